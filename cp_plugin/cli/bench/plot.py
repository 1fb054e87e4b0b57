"""A bar chart of the measured speeds: bars over sequence lengths, a panel for each mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cp_plugin.cli import files
from cp_plugin.cli.bench.results import CaseResult
from cp_plugin.cli.draw.canvas import new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check(path: Path) -> None:
    """ValueError for a picture that cannot be drawn or written."""
    files.check_output(path, "picture", files.PICTURES, "--plot")
    new_figure(1, 1)


def plot(path: Path, results: Sequence[CaseResult]) -> None:
    """Speed of forward and backward: 10^9 visible pairs (linear attention: 10^6 tokens) per second and rank.

    A black line is the ideal of the bar's contestant.
    """
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    masks = list(dict.fromkeys(result.case.mask_name for result in results))
    names = list(dict.fromkeys(m.name for result in results for m in result.measured if m.taken is not None))
    colours = dict(zip(names, colormaps["tab20"].colors * (1 + len(names) // 20), strict=False))
    columns = min(2, len(masks))
    rows = -(-len(masks) // columns)
    figure = new_figure(6.5 * columns, 3.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    linear = any(m.linear for result in results for m in result.measured)
    for panel in panels.flat[len(masks) :]:
        panel.set_visible(False)
    for panel, mask in zip(panels.flat, masks, strict=False):
        shown = [result for result in results if result.case.mask_name == mask]
        width = 0.8 / max(1, len(names))
        for group, result in enumerate(shown):
            offsets = {name: group + (number - (len(names) - 1) / 2) * width for number, name in enumerate(names)}
            _draw_bars(panel, result, offsets, width, colours)
        panel.set_title(mask, fontsize=10)
        panel.set_xticks(range(len(shown)), [f"{result.case.problem.seq_length:,}" for result in shown])
        panel.set_xlabel("tokens")
        panel.set_ylabel(f"{'10$^6$ tokens' if linear else '10$^9$ pairs'} / s and rank")
        panel.spines[["top", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    handles.append(Line2D((), (), color="black", lw=1))
    figure.legend(handles, [*names, "the ideal"], loc="outside lower center", ncols=min(5, 1 + len(names)), fontsize=8)
    save(figure, path)


def _draw_bars(
    panel: Axes, result: CaseResult, offsets: dict[str, float], width: float, colours: dict[str, tuple[float, ...]]
) -> None:
    p = result.case.problem
    for m in result.measured:
        if m.taken is not None and m.ideal is not None:
            work = p.tokens / 1e6 if m.linear else result.case.pairs * p.batch * p.heads / p.size / 1e9
            at, ideal = offsets[m.name], work / m.ideal.medians.total
            panel.bar(at, work / m.taken.medians.total, width, color=colours[m.name])
            panel.hlines(ideal, at - width / 2, at + width / 2, color="black", lw=1)
