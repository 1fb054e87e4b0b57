"""Pictures of predicted over published figures: a strip of points for each table or series."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from cp_plugin.cli.draw.canvas import IDLE, INK, POINTS, RANK_COLOURS, WIDTH, new_figure, plain_ticks, save
from evidence import data
from evidence.reproduce import ZERO_FIT, Reproduction

_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.4, 2, 3, 5, 10, 20, 50)
_FINE = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.4)
_LINE = 48
"""Characters of a line of words."""


def draw(found: Reproduction, name: str, path: Path) -> None:
    """Draw a strip per table of a paper, with zero fit; ValueError without matplotlib."""
    strips = {}
    for table in data.paper(name).tables:
        own = [p for p in found.predicted if (p.row.paper, p.row.table) == (name, table.id) and p.row.published]
        if ratios := [p.values["zero fit"] / (p.row.published or 1.0) for p in own if "zero fit" in p.values]:
            strips[f"{table.where} [{table.figure}]"] = (ratios, [])
    draw_strips(strips, path, f"predicted / published, with nothing fitted;\nband: {ZERO_FIT:.0%}; number: median")


def draw_strips(strips: Mapping[str, tuple[Sequence[float], Sequence[float]]], path: Path, words: str) -> None:
    """Draw the ratios of each strip as points, filled and hollow, and the median of the filled (or hollow) ones."""
    labels = ["\n".join(textwrap.wrap(label, _LINE)) for label in strips]
    lines = [label.count("\n") + 1 for label in labels]
    figure = new_figure(WIDTH, 1.0 + sum(0.38 + 0.19 * n for n in lines))
    axes = figure.subplots()
    top = 0.0
    values = [ratio for both in strips.values() for side in both for ratio in side]
    low, high = (max(t for t in _TICKS if t <= min(*values, 0.8)), min(t for t in _TICKS if t >= max(*values, 1.25)))
    for label, n, (filled, hollow) in zip(labels, lines, strips.values(), strict=True):
        axes.text(low, top, label, fontsize=POINTS, va="top")
        at = top + 0.19 * n + 0.16
        axes.fill_betweenx((at - 0.12, at + 0.12), 1 - ZERO_FIT, 1 + ZERO_FIT, color=IDLE, linewidth=0)
        axes.plot((1, 1), (at - 0.12, at + 0.12), color=INK, linewidth=0.8)
        axes.scatter(filled, [at] * len(filled), s=22, color=RANK_COLOURS[0], alpha=0.7, linewidths=0)
        axes.scatter(hollow, [at] * len(hollow), s=22, facecolors="none", edgecolors=RANK_COLOURS[1])
        axes.text(1.02, at, f"{median(filled or hollow):.2f}", transform=axes.get_yaxis_transform(), va="center")
        top += 0.38 + 0.19 * n
    plain_ticks(axes, x=[tick for tick in (_FINE if high <= 2 * low else _TICKS) if low <= tick <= high])
    axes.set(xlim=(low, 1.06 * high), ylim=(top, -0.1), yticks=[])
    axes.set_xlabel(words, fontsize=POINTS)
    axes.spines[["left", "right", "top"]].set_visible(False)
    save(figure, path)
