"""The picture of a method: which rank computes which block, in which step, and the time of each step.

    cp-plugin draw --provider attention2d --plot grid.svg --ranks 4 --grid 2x2

It is drawn from a recording (``cp_plugin.cli.draw.calls``), so third-party providers can be drawn, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cp_plugin.cli.draw.calls import Recording, record
from cp_plugin.cli.draw.canvas import (
    IDLE,
    RANK_COLOURS,
    Box,
    about,
    box,
    check_ranks,
    draw_holders,
    draw_timeline,
    fill,
    ink_on,
    new_figure,
    paler,
    plain,
    save,
)
from cp_plugin.common.text import in_words
from cp_plugin.methods.protocol import Provider

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_method(
    path: Path,
    provider: str | Provider,
    size: int = 4,
    *,
    tokens: int = 0,
    timed_tokens: int = 0,
    heads: int = 0,
    kv_heads: int = 0,
    causal: bool = True,
    **options: Any,
) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix).

    Args:
        size: context-parallel ranks, at most 8.
        tokens: drawn one by one; 0: eight per rank.
        timed_tokens: of the timeline, where the ragged edge of a short sequence would mislead; 0: about 8192.
        heads: query heads; 0: one per rank. The matrices show head 0.
        kv_heads: 0: as many as query heads.
        options: as for ``ContextParallel``.

    Raises:
        ValueError: if matplotlib is missing, there are more ranks than colours, or the provider refuses the problem.
    """
    check_ranks(size)
    asked = {"heads": heads, "kv_heads": kv_heads, "causal": causal, **options}
    shown = record(provider, size, seq_length=tokens or 8 * size, **asked)
    timed = record(provider, size, seq_length=timed_tokens or about(8192, size), **asked)
    divided = len(shown.ranks_of(0)) < size
    figure = new_figure(10, 9.3 if divided else 8.6)
    rows = figure.add_gridspec(4, 2, height_ratios=(0.8, 0.8 if divided else 0.01, 6.5, 2.2 if size <= 4 else 3))
    draw_holders(figure.add_subplot(rows[0, :]), shown.holders(), f"{_title(shown)}: which rank holds each token")
    if divided:
        _draw_heads(figure.add_subplot(rows[1, :]), shown)
    figure.get_layout_engine().set(wspace=0.06)
    _draw_blocks(figure.add_subplot(rows[2, 0]), shown, divided)
    draw_matrix(matrix := figure.add_subplot(rows[2, 1]), shown)
    mask = "causal" if causal else "full"
    title = f"The {mask} attention matrix{', head 0' if divided else ''}; paler: later step"
    matrix.set_title(title, fontsize=10, loc="left")
    _draw_time(figure.add_subplot(rows[3, :]), timed)
    save(figure, path)


def _title(recording: Recording) -> str:
    ranks = "1 rank" if recording.size == 1 else f"{recording.size} ranks"
    shown = {name: value for name, value in recording.options.chosen.items() if name not in ("backward", "head_groups")}
    options = (f"{name.replace('_', ' ')} {in_words(value)}" for name, value in shown.items())
    return f"{recording.provider}, {ranks} ({', '.join((f'{recording.layout} tokens', *options))})"


def _draw_heads(axes: Axes, recording: Recording) -> None:
    for head in range(recording.heads):
        ranks = recording.ranks_of(head)
        for i, rank in enumerate(ranks):
            width, middle = 1 / len(ranks), head + (i + 0.5) / len(ranks)
            axes.add_patch(box(head + i / len(ranks), 0, width, 1, RANK_COLOURS[rank], line="white"))
            axes.text(middle, 0.5, str(rank), ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(0, recording.heads), ylim=(0, 1), yticks=[], xticks=[h + 0.5 for h in range(recording.heads)])
    axes.set_xticklabels([f"head {h}" for h in range(recording.heads)])
    axes.set_title("heads are divided, too: which ranks compute each query head", fontsize=10, loc="left")
    plain(axes)


def _draw_blocks(axes: Axes, recording: Recording, divided: bool) -> None:
    """The attention matrix with tokens sorted by the rank that holds them."""
    size, n = recording.size, recording.seq_length
    place = {int(p): i for i, p in enumerate(p for held in recording.held for p in held)}
    work = [[0] * size for _ in range(size)]
    seen: list[list[set[tuple[int, int]]]] = [[set() for _ in range(size)] for _ in range(size)]
    axes.add_patch(box(0, 0, n, n, IDLE))
    for call in (c for c in recording.calls if 0 in c.heads):
        rows, columns = _places(call.queries, place), _places(call.keys, place)
        width = n // size
        for i, j in itertools.product({r // width for r in rows}, {c // width for c in columns}):
            work[i][j] += _visible_between(recording, i, j)
            seen[i][j].add((call.rank, call.step))
        runs = itertools.product(_runs(rows), _runs(columns))
        shapes: list[Box] = [(x.start, y.start, len(x), len(y)) for y, x in runs]
        fill(axes, shapes, _colour(call.rank, call.step, recording))
    for i, j in itertools.product(range(size), range(size)):
        _label_block(axes, recording, i, j, seen[i][j] if work[i][j] else set())
    ticks = [(i + 0.5) * n / size for i in range(size)]
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=ticks, yticks=ticks)
    axes.set_xticklabels([str(i) for i in range(size)])
    axes.set_yticklabels([str(i) for i in range(size)])
    axes.set(xlabel="keys of the tokens held by rank", ylabel="queries of the tokens held by rank")
    axes.set_title(f"Who computes each block{', head 0' if divided else ''}", fontsize=10, loc="left")
    plain(axes)


def _label_block(axes: Axes, recording: Recording, i: int, j: int, by: set[tuple[int, int]]) -> None:
    width = recording.seq_length / recording.size
    x, y = j * width, i * width
    axes.add_patch(box(x, y, width, width, "none" if by else IDLE, line="white"))
    if not by:
        axes.text(x + width / 2, y + width / 2, "masked", ha="center", va="center", color="grey", fontsize=8)
    elif len(by) == 1:
        ((rank, step),) = by
        ink, points = ink_on(_colour(rank, step, recording)), 10 if recording.size <= 4 else 6.5
        words = f"rank {rank}\nstep {step}"
        axes.text(x + width / 2, y + width / 2, words, ha="center", va="center", color=ink, fontsize=points)


def draw_matrix(axes: Axes, recording: Recording) -> None:
    """The attention matrix of head 0 in the order of the sequence: ranks by colour, later steps paler."""
    n = recording.seq_length
    for call in (c for c in recording.calls if 0 in c.heads):
        keys = sorted(call.keys.tolist())
        shapes: list[Box] = []
        for query in call.queries.tolist():
            visible = [key for key in keys if key <= query or not recording.causal]
            shapes += [(run.start, query, len(run), 1) for run in _runs(visible)]
        fill(axes, shapes, _colour(call.rank, call.step, recording))
    axes.set(xlim=(0, n), ylim=(n, 0), aspect="equal", xticks=[], yticks=[])
    axes.set(xlabel="keys, in the order of the sequence", ylabel="queries, in the order of the sequence")
    plain(axes)


def _draw_time(axes: Axes, timed: Recording) -> None:
    draw_timeline(axes, timed.work(), timed.mean(), max(timed.critical_path(), 1.0))
    axes.set_title(
        f"Work in each step (grey: waits for the busiest rank). Busiest rank over mean: {timed.balance():.2f}",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel("time of attention alone, without communication; 1 (dotted) = perfectly divided", fontsize=8)


def _visible_between(recording: Recording, i: int, j: int) -> int:
    queries, keys = recording.held[i], recording.held[j]
    return int((keys[None, :] <= queries[:, None]).sum()) if recording.causal else len(queries) * len(keys)


def _colour(rank: int, step: int, recording: Recording) -> tuple[float, float, float]:
    steps = 1 + max(call.step for call in recording.calls)
    return paler(RANK_COLOURS[rank], 0.75 * step / steps)


def _places(positions: Tensor, place: dict[int, int]) -> list[int]:
    return sorted(place[int(p)] for p in positions)


def _runs(increasing: Sequence[int]) -> Iterator[range]:
    """Increasing integers as maximal runs of neighbours."""
    start = 0
    for end in range(1, len(increasing) + 1):
        if end == len(increasing) or increasing[end] != increasing[end - 1] + 1:
            yield range(increasing[start], increasing[end - 1] + 1)
            start = end
