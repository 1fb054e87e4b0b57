"""The picture of all layouts: token placement, the work of each step of a ring, and its time."""

from __future__ import annotations

from pathlib import Path

from cp_plugin.cli.draw.calls import record
from cp_plugin.cli.draw.canvas import WIDTH, about, check_ranks, draw_holders, draw_timeline, new_figure, save
from cp_plugin.cli.draw.method import draw_matrix
from cp_plugin.core.layout import LAYOUTS
from cp_plugin.methods import registry as providers


def draw_layouts(path: Path, size: int = 4, tokens: int = 32, timed_tokens: int = 0) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix).

    Args:
        tokens: drawn one by one.
        timed_tokens: of the timelines, where the ragged edge of a short sequence would mislead; 0: about 8192.

    Raises:
        ValueError: if matplotlib is missing, there are more ranks than colours, or the tokens cannot be divided.
    """
    check_ranks(size)
    figure = new_figure(2.6 * WIDTH, 3.4 * len(LAYOUTS))
    grid = figure.add_gridspec(2 * len(LAYOUTS), 2, width_ratios=(1, 2.2), height_ratios=(1, 3.4) * len(LAYOUTS))
    shown, timed = (
        [record(ring_on(layout), size, seq_length=n, heads=1, layout=layout) for layout in LAYOUTS]
        for n in (tokens, timed_tokens or about(8192, size))
    )
    longest = max(recording.critical_path() for recording in timed)
    for row, (short, long) in enumerate(zip(shown, timed, strict=True)):
        matrix = figure.add_subplot(grid[2 * row : 2 * row + 2, 0])
        draw_matrix(matrix, short)
        matrix.set_title("colour: rank   paler: later step", fontsize=9, loc="left")
        title = f"{short.layout}: the rank that holds each of {tokens} tokens"
        draw_holders(figure.add_subplot(grid[2 * row, 1]), short.holders(), title)
        timeline = figure.add_subplot(grid[2 * row + 1, 1])
        draw_timeline(timeline, long.work(), long.mean(), longest)
        timeline.set_xlabel("time of causal attention, 1 = perfectly balanced (dotted); grey = idle", fontsize=8)
    save(figure, path)


def ring_on(layout: str) -> str:
    """The provider of a ring on this layout."""
    return next(name for name in ("ring", "striped") if layout in providers.get(name).layouts)
