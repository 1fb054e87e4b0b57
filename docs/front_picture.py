"""The picture of the README and of the front page: what the plugin adds, a grid of ranks and needed keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.testing.traffic import priced, typical
from cp_plugin.tools.draw.calls import record
from cp_plugin.tools.draw.canvas import IDLE, INK, box, fill, new_figure, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE = 8
"""Rows, and columns, of the grid of ranks."""
BOUNDS = (0, 24, 38, 48, 56, 61, 64)
RANKS = 4
"""Ranks that share the pack of documents."""
GROUPED = 8
"""Key/value heads of most models with 32 query heads."""
_QUERIES, _KEYS, _BOTH = "#2f5f93", "#e8a33d", "#7a2f3f"
_POINTS = 15
"""Size of words: 11 px where the picture is as wide as a phone."""


def draw(path: Path) -> None:
    """Write the picture."""
    figure = new_figure(6.4, 4.6)
    left, right = figure.subplots(1, 2)
    _draw_grid(left)
    _draw_pack(right)
    save(figure, path)


def share(ranks: int, kv_heads: int) -> float:
    """Bytes of ``attention2d`` on its best grid over a ring's, with 32 query heads."""
    ratio = priced("attention2d", replace(typical(ranks, "MHA"), kv_heads=kv_heads)).ratio
    assert ratio is not None
    return ratio


def _draw_grid(axes: Axes) -> None:
    """Draw all ranks, and the row and the column of one of them."""
    row, column = 2, 5
    for i in range(SIDE):
        for j in range(SIDE):
            colour = _BOTH if (i, j) == (row, column) else _QUERIES if i == row else _KEYS if j == column else IDLE
            axes.add_patch(box(j + 0.06, i + 0.06, 0.88, 0.88, colour))
    words = f"queries along the row,\nkeys along the column:\n{share(SIDE**2, 32):.2f} of a ring's bytes\n"
    words += f"({GROUPED} KV heads: {share(SIDE**2, GROUPED):.2f})"
    _frame(axes, SIDE, f"a grid of {SIDE**2} ranks", words)


def _draw_pack(axes: Axes) -> None:
    """The keys that the queries of a pack may see: held by their rank, or fetched."""
    recording = record("needed", RANKS, seq_length=BOUNDS[-1], bounds=BOUNDS, layout="documents")
    tokens, holders = recording.seq_length, recording.holders()
    axes.add_patch(box(0, 0, tokens, tokens, IDLE))
    for held, colour in ((True, _QUERIES), (False, _KEYS)):
        pairs = [
            (key, query, 1, 1)
            for query, rank in enumerate(holders)
            for key in recording.seen(query)
            if (holders[key] == rank) is held
        ]
        fill(axes, pairs, colour)
    sent, every = sum(map(len, recording.fetched())), (RANKS - 1) * tokens
    words = f"a rank fetches only keys\nthat its mask allows:\n{sent / every:.2f} of a ring's bytes"
    _frame(axes, tokens, f"{len(BOUNDS) - 1} documents, {RANKS} ranks", words)


def _frame(axes: Axes, side: int, title: str, words: str) -> None:
    axes.set(xlim=(0, side), ylim=(side, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_title(title, fontsize=_POINTS + 1, loc="left", color=INK)
    axes.set_xlabel(words, fontsize=_POINTS, loc="left", color=INK)
    plain(axes)
