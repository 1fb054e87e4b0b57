"""Pictures of layouts, drawn from the code that training uses.

    cp-plugin draw layouts.png

For every layout: who holds which token; which rank computes which part of the causal attention matrix, and in which
step of a ring; and what that means in time. Each step of a ring lasts as long as its busiest rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.layout import LAYOUTS, Layout
from cp_plugin.tiles import tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

_RANK_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#000000")
_IDLE = "#f0f0f0"


def ring_work(layout: Layout, size: int, seq_length: int) -> list[list[int]]:
    """``work[rank][step]``: visible (query, key) pairs that a rank computes in each step of a causal ring."""
    held = [layout.segments(seq_length, size, i) for i in range(size)]
    return [
        [sum(t.pairs for t in tiles(held[i], held[(i - step) % size], True)) for step in range(size)]
        for i in range(size)
    ]


def critical_path(work: list[list[int]]) -> int:
    """Pairs on the critical path of a ring: the busiest rank of every step, summed."""
    return sum(max(step) for step in zip(*work, strict=True))


def draw_layouts(path: Path, size: int = 4, tokens: int = 32, timed_tokens: int = 8192) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix).

    Raises:
        ValueError: if matplotlib is missing, there are more ranks than colours, or the tokens cannot be divided.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install 'cp-plugin[plot]'") from None
    if size > len(_RANK_COLOURS):
        raise ValueError(f"{size} ranks cannot be told apart in a picture: use {len(_RANK_COLOURS)} or fewer")
    figure = Figure(figsize=(13, 3.1 * len(LAYOUTS)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 * len(LAYOUTS), 2, width_ratios=(1, 2.2), height_ratios=(1, 3.4) * len(LAYOUTS))
    ideal = timed_tokens * (timed_tokens + 1) / 2 / size
    works = {name: ring_work(layout, size, timed_tokens) for name, layout in LAYOUTS.items()}
    longest = max(map(critical_path, works.values())) / ideal
    for row, layout in enumerate(LAYOUTS.values()):
        _draw_matrix(figure.add_subplot(grid[2 * row : 2 * row + 2, 0]), layout, size, tokens)
        strip = figure.add_subplot(grid[2 * row, 1])
        _draw_tokens(strip, layout, size, tokens)
        timeline = figure.add_subplot(grid[2 * row + 1, 1])
        _draw_timeline(timeline, works[layout.name], ideal, longest)
    figure.savefig(path, dpi=110)


def _draw_tokens(axes: Axes, layout: Layout, size: int, tokens: int) -> None:
    for index in range(size):
        for position in (p for s in layout.segments(tokens, size, index) for p in s):
            axes.add_patch(_box(position, 0, 1, 1, _RANK_COLOURS[index], line="white"))
            axes.text(position + 0.5, 0.5, str(index), ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(0, tokens), ylim=(0, 1), yticks=[], xticks=range(0, tokens + 1, tokens // 8))
    axes.set_title(f"{layout.name}: the rank that holds each of {tokens} tokens", fontsize=10, loc="left")
    _plain(axes)


def _draw_matrix(axes: Axes, layout: Layout, size: int, tokens: int) -> None:
    held = [layout.segments(tokens, size, i) for i in range(size)]
    positions = [[p for s in segments for p in s] for segments in held]
    for q_rank in range(size):
        for step in range(size):
            k_rank = (q_rank - step) % size
            for tile in tiles(held[q_rank], held[k_rank], True):
                for m, i in enumerate(tile.q):
                    for j in tile.k[: m + tile.diagonal + 1]:
                        box = _box(positions[k_rank][j], positions[q_rank][i], 1, 1, _RANK_COLOURS[q_rank])
                        box.set_alpha(1 - 0.8 * step / size)
                        axes.add_patch(box)
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), aspect="equal", xticks=[], yticks=[], xlabel="keys", ylabel="queries")
    axes.set_title("colour: rank   paler: later step", fontsize=9, loc="left")
    _plain(axes)


def _draw_timeline(axes: Axes, work: list[list[int]], ideal: float, longest: float) -> None:
    start = 0.0
    for step, pairs in enumerate(zip(*work, strict=True)):
        length = max(pairs) / ideal
        for rank, mine in enumerate(pairs):
            axes.add_patch(_box(start, rank + 0.1, length, 0.8, _IDLE, line="white"))
            axes.add_patch(_box(start, rank + 0.1, mine / ideal, 0.8, _RANK_COLOURS[rank], line="white"))
        axes.text(start + length / 2, -0.1, f"step {step}", ha="center", va="bottom", fontsize=8)
        start += length
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1)
    axes.text(start + 0.02, len(work) / 2, f"{start:.2f}", va="center", fontsize=12, fontweight="bold")
    axes.set(xlim=(0, longest * 1.12), ylim=(len(work), -0.7), yticks=[r + 0.5 for r in range(len(work))])
    axes.set_yticklabels([f"rank {r}" for r in range(len(work))], fontsize=8)
    axes.set_xlabel("time of causal attention, 1 = perfectly balanced (dotted); grey = idle", fontsize=8)
    _plain(axes)


def _box(x: float, y: float, width: float, height: float, colour: str, line: str = "none") -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, edgecolor=line, linewidth=0.5)


def _plain(axes: Axes) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8)
