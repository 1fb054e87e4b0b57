"""The picture of the token layouts.

    cp-plugin draw layouts.png

For every layout: who holds which token; which rank computes which part of the causal attention matrix, and in which
step of a ring; and what that means in time. Each step of a ring lasts as long as its busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.cli.draw.canvas import (
    RANK_COLOURS,
    about,
    box,
    check_ranks,
    draw_holders,
    draw_timeline,
    new_figure,
    plain,
    save,
)
from cp_plugin.core.layout import LAYOUTS, Layout
from cp_plugin.core.mask import CAUSAL
from cp_plugin.core.tiles import tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def ring_work(layout: Layout, size: int, seq_length: int) -> list[list[int]]:
    """``work[rank][step]``: visible (query, key) pairs that a rank computes in each step of a causal ring."""
    held = [layout.segments(seq_length, size, i) for i in range(size)]
    return [
        [sum(t.pairs for t in tiles(held[i], held[(i - step) % size], CAUSAL)) for step in range(size)]
        for i in range(size)
    ]


def critical_path(work: Sequence[Sequence[int]]) -> int:
    """Pairs on the critical path: the busiest rank of every step, summed."""
    return sum(max(step) for step in zip(*work, strict=True))


def draw_layouts(path: Path, size: int = 4, tokens: int = 32, timed_tokens: int = 0) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix).

    Raises:
        ValueError: if matplotlib is missing, there are more ranks than colours, or the tokens cannot be divided.
    """
    check_ranks(size)
    timed_tokens = timed_tokens or about(8192, size)
    figure = new_figure(13, 3.1 * len(LAYOUTS))
    grid = figure.add_gridspec(2 * len(LAYOUTS), 2, width_ratios=(1, 2.2), height_ratios=(1, 3.4) * len(LAYOUTS))
    ideal = timed_tokens * (timed_tokens + 1) / 2 / size
    works = {name: ring_work(layout, size, timed_tokens) for name, layout in LAYOUTS.items()}
    longest = max(map(critical_path, works.values())) / ideal
    for row, layout in enumerate(LAYOUTS.values()):
        _draw_matrix(figure.add_subplot(grid[2 * row : 2 * row + 2, 0]), layout, size, tokens)
        strip = figure.add_subplot(grid[2 * row, 1])
        draw_holders(
            strip, _holders(layout, size, tokens), f"{layout.name}: the rank that holds each of {tokens} tokens"
        )
        timeline = figure.add_subplot(grid[2 * row + 1, 1])
        draw_timeline(timeline, works[layout.name], ideal, longest)
        timeline.set_xlabel("time of causal attention, 1 = perfectly balanced (dotted); grey = idle", fontsize=8)
    save(figure, path)


def _holders(layout: Layout, size: int, tokens: int) -> list[int]:
    at = {p: index for index in range(size) for s in layout.segments(tokens, size, index) for p in s}
    return [at[position] for position in range(tokens)]


def _draw_matrix(axes: Axes, layout: Layout, size: int, tokens: int) -> None:
    held = [layout.segments(tokens, size, i) for i in range(size)]
    positions = [[p for s in segments for p in s] for segments in held]
    for q_rank in range(size):
        for step in range(size):
            k_rank = (q_rank - step) % size
            for tile in tiles(held[q_rank], held[k_rank], CAUSAL):
                for m, i in enumerate(tile.q):
                    for j in tile.k[: m + tile.diagonal + 1]:
                        cell = box(positions[k_rank][j], positions[q_rank][i], 1, 1, RANK_COLOURS[q_rank])
                        cell.set_alpha(1 - 0.8 * step / size)
                        axes.add_patch(cell)
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal", xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    axes.set_title("colour: rank   paler: later step", fontsize=9, loc="left")
    plain(axes)
