"""The timeline of an attention call: what every rank computes, sends and waits for.

A rank has a row for its kernels, and below it one for the messages of each mesh axis; forward and backward are side by
side on one scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.cli.draw.canvas import new_figure, plain, save
from cp_plugin.planner.trace.simulation import WAITING, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 8
"""Ranks in a picture, at most, evenly spaced."""
_KERNELS = {"attention": "#4477aa", "products": "#66ccee", "memory": "#ccbb44", "host": "#dddddd"}
_MESSAGES = ("#228833", "#ee6677", "#aa3377", "#bbbbbb")
_HATCHED = {"facecolor": "white", "edgecolor": "#888888", "hatch": "////"}
_KERNEL_HEIGHT, _MESSAGE_HEIGHT, _GAP = 1.0, 0.45, 0.35


Passes = Mapping[str, Mapping[int, Sequence[Span]]]
"""Pass -> rank -> its activities."""


def draw_gantt(path: Path, title: str, passes: Passes) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix); ValueError if matplotlib is missing."""
    ranks = _spread(sorted(next(iter(passes.values()))))
    lanes = _lanes(passes)
    height = len(ranks) * (_KERNEL_HEIGHT + len(lanes) * _MESSAGE_HEIGHT + _GAP)
    figure = new_figure(13, 1.6 + 0.28 * height)
    lengths = [max(piece.end for pieces in found.values() for piece in pieces) for found in passes.values()]
    widths = [max(length, 0.05 * max(lengths)) for length in lengths]
    panels = figure.subplots(1, len(passes), squeeze=False, width_ratios=widths)[0]
    for column, (axes, (name, found)) in enumerate(zip(panels, passes.items(), strict=True)):
        _draw_pass(axes, {rank: found[rank] for rank in ranks}, lanes, named=column == 0)
        axes.set(xlim=(0, widths[column]), ylim=(height, 0), xlabel="ms")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value * 1e3:g}")
        axes.set_title(f"{name}: {lengths[column] * 1e3:.3g} ms", fontsize=10, loc="left")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _legend(figure, lanes)
    save(figure, path)


def _spread(ranks: Sequence[int]) -> list[int]:
    if len(ranks) <= SHOWN:
        return list(ranks)
    return [ranks[i * (len(ranks) - 1) // (SHOWN - 1)] for i in range(SHOWN)]


def _lanes(passes: Passes) -> list[str]:
    """The axes of messages; each has a row."""
    every = (piece for found in passes.values() for pieces in found.values() for piece in pieces)
    return list(dict.fromkeys(_lane(piece) for piece in every if piece.what not in (*_KERNELS, WAITING)))


def _lane(piece: Span) -> str:
    """The row of an activity: a kind of kernel, or an axis."""
    return piece.what.split()[-1]


def _draw_pass(axes: Axes, found: Mapping[int, Sequence[Span]], lanes: Sequence[str], *, named: bool) -> None:
    top, ticks = 0.0, []
    for pieces in found.values():
        for what, colour in _KERNELS.items():
            axes.broken_barh(_bars(pieces, what), (top, _KERNEL_HEIGHT), facecolor=colour, linewidth=0)
        axes.broken_barh(_bars(pieces, WAITING), (top, _KERNEL_HEIGHT), lw=0.3, **_HATCHED)
        ticks.append(top + _KERNEL_HEIGHT / 2)
        top += _KERNEL_HEIGHT
        for number, lane in enumerate(lanes):
            colour = _MESSAGES[number % len(_MESSAGES)]
            axes.broken_barh(_bars(pieces, lane), (top, _MESSAGE_HEIGHT * 0.85), facecolor=colour, lw=0.3, ec="white")
            top += _MESSAGE_HEIGHT
        top += _GAP
    axes.set_yticks(ticks, [f"rank {rank}" for rank in found] if named else [""] * len(ticks))
    plain(axes)


def _bars(pieces: Sequence[Span], lane: str) -> list[tuple[float, float]]:
    """(start, length); adjacent kernels are one bar."""
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
    handles.append(Patch(**_HATCHED, label="waiting for messages"))
    colours = [_MESSAGES[n % len(_MESSAGES)] for n in range(len(lanes))]
    handles += [Patch(color=c, label=f"messages along {lane}") for c, lane in zip(colours, lanes, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
