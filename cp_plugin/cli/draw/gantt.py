"""The picture of an attention call in time: what every rank computes, sends and waits for, and which part is whose.

A rank has a row for its kernels, and below it one for the messages of each mesh axis; forward and backward stand side
by side on one scale. Below them is the attention matrix in the order of the sequence, in the colours of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cp_plugin.cli import flags
from cp_plugin.cli.draw.calls import Recording
from cp_plugin.cli.draw.canvas import RANK_COLOURS, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8
"""Ranks in a picture, at most: evenly spread."""
WAITING = "waiting"
_KERNELS = {"attention": "#4477aa", "products": "#66ccee", "memory": "#ccbb44", "host": "#dddddd"}
_MESSAGES = ("#228833", "#ee6677", "#aa3377", "#bbbbbb")
_KERNEL_HEIGHT, _MESSAGE_HEIGHT, _GAP = 1.0, 0.45, 0.35


class Piece(NamedTuple):
    """Something that takes time on a rank, in seconds."""

    what: str
    """``attention``, ``products``, ``memory``, ``waiting``; of a message its verb and axis: ``exchange rows``."""
    start: float
    end: float


Passes = Mapping[str, Mapping[int, Sequence[Piece]]]
"""Name of a pass -> rank -> what happens on it."""


def draw_gantt(path: Path, title: str, passes: Passes, recording: Recording | None = None) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix).

    Args:
        recording: whose tiles are drawn below; None: none.

    Raises:
        ValueError: if matplotlib is missing, or as ``flags.check_output`` does.
    """
    flags.check_output(path, "picture", flags.PICTURES)
    ranks = _spread(sorted(next(iter(passes.values()))))
    lanes = _lanes(passes)
    height = len(ranks) * (_KERNEL_HEIGHT + len(lanes) * _MESSAGE_HEIGHT + _GAP)
    tall = 0.28 * height
    figure = new_figure(13, 1.6 + tall + (5.2 if recording is not None else 0))
    lengths = [max(piece.end for pieces in found.values() for piece in pieces) for found in passes.values()]
    widths = [max(length, 0.05 * max(lengths)) for length in lengths]
    grid = figure.add_gridspec(1 + (recording is not None), len(passes), width_ratios=widths,
                               height_ratios=(tall, 4.8)[: 1 + (recording is not None)])  # fmt: skip
    for column, (name, found) in enumerate(passes.items()):
        axes = figure.add_subplot(grid[0, column])
        _draw_pass(axes, {rank: found[rank] for rank in ranks}, lanes, named=column == 0)
        axes.set(xlim=(0, widths[column]), ylim=(height, 0), xlabel="ms")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g}")
        axes.set_title(f"{name}: {lengths[column] * 1e3:.3g} ms", fontsize=10, loc="left")
    if recording is not None:
        _draw_tiles(figure.add_subplot(grid[1, :]), recording)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _legend(figure, lanes)
    save(figure, path)


def _spread(ranks: Sequence[int]) -> list[int]:
    if len(ranks) <= SHOWN:
        return list(ranks)
    return [ranks[i * (len(ranks) - 1) // (SHOWN - 1)] for i in range(SHOWN)]


def _lanes(passes: Passes) -> list[str]:
    """The axes along which messages go, each of which has a row of its own."""
    every = (piece for found in passes.values() for pieces in found.values() for piece in pieces)
    return list(dict.fromkeys(_lane(piece) for piece in every if piece.what not in (*_KERNELS, WAITING)))


def _lane(piece: Piece) -> str:
    """What has its own row: a kind of kernel, or an axis."""
    return piece.what.split()[-1]


def _draw_pass(axes: Axes, found: Mapping[int, Sequence[Piece]], lanes: Sequence[str], *, named: bool) -> None:
    top, ticks = 0.0, []
    for pieces in found.values():
        for what, colour in _KERNELS.items():
            axes.broken_barh(_bars(pieces, what), (top, _KERNEL_HEIGHT), facecolor=colour, linewidth=0)
        axes.broken_barh(
            _bars(pieces, WAITING), (top, _KERNEL_HEIGHT), facecolor="white", edgecolor="#888888", hatch="////", lw=0.3
        )
        ticks.append(top + _KERNEL_HEIGHT / 2)
        top += _KERNEL_HEIGHT
        for number, lane in enumerate(lanes):
            colour = _MESSAGES[number % len(_MESSAGES)]
            axes.broken_barh(_bars(pieces, lane), (top, _MESSAGE_HEIGHT * 0.85), facecolor=colour, lw=0.3, ec="white")
            top += _MESSAGE_HEIGHT
        top += _GAP
    axes.set_yticks(ticks, [f"rank {rank}" for rank in found] if named else [""] * len(ticks))
    plain(axes)


def _bars(pieces: Sequence[Piece], lane: str) -> list[tuple[float, float]]:
    """Start and length; what touches is one bar."""
    found: list[tuple[float, float]] = []
    for piece in sorted(p for p in pieces if _lane(p) == lane and p.end > p.start):
        end = found[-1][0] + found[-1][1] if found else -1.0
        if lane in _KERNELS and piece.start <= end:
            found[-1] = (found[-1][0], piece.end - found[-1][0])
        else:
            found.append((piece.start, piece.end - piece.start))
    return found


def _legend(figure: Figure, lanes: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=what) for what, colour in _KERNELS.items()]
    handles.append(Patch(facecolor="white", edgecolor="#888888", hatch="////", label="waiting for messages"))
    handles += [
        Patch(color=_MESSAGES[n % len(_MESSAGES)], label=f"messages along {lane}") for n, lane in enumerate(lanes)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _draw_tiles(axes: Axes, recording: Recording) -> None:
    """The attention matrix of head 0: the rank that computes each (query, key) pair."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    n, size = recording.seq_length, recording.size
    spread = colormaps["turbo"]
    colours = [to_rgb(c) for c in RANK_COLOURS[:size]] if size <= len(RANK_COLOURS) else [
        tuple(spread(rank / (size - 1))[:3]) for rank in range(size)
    ]  # fmt: skip
    picture = np.ones((n, n, 3))
    for call in (c for c in recording.calls if 0 in c.heads):
        rows, keys = np.meshgrid(call.queries.numpy(), call.keys.numpy(), indexing="ij")
        seen = keys <= rows if recording.causal else np.ones_like(rows, dtype=bool)
        picture[rows[seen], keys[seen]] = colours[call.rank]
    axes.imshow(picture, interpolation="nearest", extent=(0, n, n, 0))
    axes.set(xticks=[], yticks=[], xlabel="keys, in the order of the sequence", ylabel="queries")
    of = f"{recording.provider}, {recording.layout} tokens, {size} ranks"
    axes.set_title(f"Who computes which part of the attention matrix, head 0:\n{of}", fontsize=10, loc="left")
    axes.set_anchor("W")
    plain(axes)
    if size <= len(RANK_COLOURS):
        from matplotlib.patches import Patch

        handles = [Patch(color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8, frameon=False)
    else:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        axes.figure.colorbar(ScalarMappable(Normalize(0, size - 1), spread), ax=axes, label="rank", shrink=0.8)
