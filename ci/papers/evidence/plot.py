"""Pictures of predicted and published figures, one per paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.cli.draw.canvas import RANK_COLOURS, new_figure, save
from evidence import data
from evidence.reproduce import ZERO_FIT, Reproduction
from evidence.score import Predicted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ACROSS = 3
_BANDS = 4
"""Maximum number of error bands per panel."""
_LOGARITHMIC = 12
"""Range of a panel from which its axis is logarithmic."""


def draw(found: Reproduction, name: str, path: Path) -> None:
    """Draw a panel per table: published lines, predicted points (zero fit filled); ValueError without matplotlib."""
    shown = [t for t in data.paper(name).tables if _of(found, name, t.id)]
    down = -(-len(shown) // _ACROSS)
    figure = new_figure(12, 3.4 * down)
    for place, table in enumerate(shown):
        axes = figure.add_subplot(down, _ACROSS, place + 1)
        _panel(axes, _of(found, name, table.id), mixed=bool(table.columns))
        axes.set_title(table.where, fontsize=7, wrap=True)
        axes.set_ylabel(table.figure, fontsize=7)
        axes.tick_params(labelsize=6)
    figure.suptitle(
        f"{data.paper(name).title}: published (lines) and predicted (points; hollow: with this paper left out). "
        f"Bands: {100 * ZERO_FIT:.0f} %",
        fontsize=9,
    )
    save(figure, path)


def _of(found: Reproduction, name: str, table: str) -> list[Predicted]:
    return [p for p in found.predicted if p.row.paper == name and p.row.table == table and "zero fit" in p.values]


def _panel(axes: Axes, predicted: list[Predicted], mixed: bool) -> None:
    """mixed: columns differ in model or number of devices."""
    series: dict[tuple[str, ...], list[Predicted]] = {}
    for p in predicted:
        series.setdefault(_line(p, mixed), []).append(p)
    telling = [i for i in range(len(_line(predicted[0], mixed))) if len({name[i] for name in series}) > 1]
    columns = list(dict.fromkeys(_column(p) for p in predicted))
    varying = mixed or len({p.row.length for p in predicted}) > 1
    for i, (name, points) in enumerate(series.items()):
        colour = RANK_COLOURS[i % len(RANK_COLOURS)]
        x = [columns.index(_column(p)) if mixed else p.row.length if varying else i for p in points]
        _draw_line(axes, x, points, colour, band=len(series) <= _BANDS)
        label = ", ".join(name[k] for k in telling) or name[0]
        axes.scatter(x, [p.values["zero fit"] for p in points], s=14, color=colour, label=label)
        axes.scatter(x, [p.values["a paper left out"] for p in points], s=14, facecolors="none", edgecolors=colour)
    if mixed:
        axes.set_xticks(range(len(columns)), columns)
    elif varying:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens", fontsize=7)
    else:
        axes.set_xticks([])
    values = [p.row.published or 1.0 for p in predicted]
    if max(values) > _LOGARITHMIC * min(values):
        axes.set_yscale("log")
    axes.legend(fontsize=4.5, frameon=False, ncols=2 if len(series) > 6 else 1)


def _draw_line(axes: Axes, x: list[int], points: list[Predicted], colour: str, band: bool) -> None:
    published = [p.row.published or 0.0 for p in points]
    if len(x) == 1:
        axes.errorbar(x, published, yerr=ZERO_FIT * published[0], color=colour, marker="_", markersize=10)
        return
    axes.plot(x, published, color=colour, linewidth=1)
    if band:
        low, high = ([y * (1 + sign * ZERO_FIT) for y in published] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)


def _line(p: Predicted, mixed: bool) -> tuple[str, ...]:
    """Key of a line in a panel."""
    row = p.row
    of = row.work.removeprefix("attention").strip() or "forward and backward"
    shared = f", tensor {row.tensor}" if row.tensor > 1 else ""
    own = ("", "") if mixed else (row.model, f"{row.devices} devices{shared}")
    return row.method, row.baseline, row.cluster, of, *own


def _column(p: Predicted) -> str:
    return f"{p.row.model.rpartition('-')[2]}\n{p.row.length // 1024}k\non {p.row.devices}"
