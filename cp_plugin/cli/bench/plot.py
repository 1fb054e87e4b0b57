"""A bar chart of the measured speeds: bars over sequence lengths, a panel for each mask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cp_plugin.cli import flags
from cp_plugin.cli.bench.results import CaseResult, Measured
from cp_plugin.cli.draw.canvas import new_figure, save


def check(path: Path) -> None:
    """ValueError for a picture that cannot be drawn, or not be written."""
    flags.check_output(path, "picture", flags.PICTURES)
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
    for panel in panels.flat[len(masks) :]:
        panel.set_visible(False)
    for panel, mask in zip(panels.flat, masks, strict=False):
        shown = [result for result in results if result.case.mask_name == mask]
        width = 0.8 / max(1, len(names))
        for number, name in enumerate(names):
            for group, result in enumerate(shown):
                _bar(panel, result, name, group + (number - (len(names) - 1) / 2) * width, width, colours[name])
        panel.set_title(mask, fontsize=10)
        panel.set_xticks(range(len(shown)), [f"{result.case.problem.seq_length:,}" for result in shown])
        panel.set_xlabel("tokens")
        panel.set_ylabel(f"{_unit(results)} / s and rank")
        panel.spines[["top", "right"]].set_visible(False)
    handles = [Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    handles.append(Line2D((), (), color="black", lw=1))
    figure.legend(handles, [*names, "the ideal"], loc="outside lower center", ncols=min(5, 1 + len(names)), fontsize=8)
    save(figure, path)


def _bar(panel: object, result: CaseResult, name: str, at: float, width: float, colour: object) -> None:
    for m in result.measured:
        if m.name == name and m.taken is not None and m.ideal is not None:
            work = _work(result, m)
            panel.bar(at, work / m.taken.medians.total, width, color=colour)  # type: ignore[attr-defined]
            ideal = work / m.ideal.medians.total
            panel.hlines(ideal, at - width / 2, at + width / 2, color="black", lw=1)  # type: ignore[attr-defined]


def _linear(m: Measured) -> bool:
    return m.setup is not None and m.setup.provider.kind == "linear"


def _work(result: CaseResult, m: Measured) -> float:
    p = result.case.problem
    return p.tokens / 1e6 if _linear(m) else result.case.pairs * p.batch * p.heads / p.size / 1e9


def _unit(results: Sequence[CaseResult]) -> str:
    linear = any(_linear(m) for result in results for m in result.measured)
    return "10$^6$ tokens" if linear else "10$^9$ pairs"
