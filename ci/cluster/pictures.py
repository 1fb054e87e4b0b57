"""Pictures of what was measured on virtual clusters: as bars, as a curve, and beside predictions.

``shown.json`` has the figures of the documentation's pictures whose runs have no record of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cp_plugin.cli.draw.canvas import IDLE, INK, POINTS, RANK_COLOURS, WIDTH, new_figure, plain_ticks, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = Path(__file__).with_name("shown.json")
_OTHERS = "#a0a0a0"
_MARKERS = "os^Dv"


def draw_bars(panels: Mapping[str, Mapping[str, float]], ours: Sequence[str], path: Path) -> None:
    """A panel per title: seconds of each contestant, ours in colour."""
    figure = new_figure(WIDTH, sum(0.75 + 0.3 * len(bars) for bars in panels.values()))
    heights = [len(bars) + 1 for bars in panels.values()]
    for axes, (title, bars) in zip(figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0],
                                   panels.items(), strict=True):  # fmt: skip
        draw_seconds(axes, title, bars, ours)
    save(figure, path)


def draw_seconds(axes: Axes, title: str, bars: Mapping[str, float], ours: Sequence[str]) -> None:
    """Horizontal bars with their seconds."""
    colours = [RANK_COLOURS[0] if name.partition(",")[0].partition("@")[0] in ours else _OTHERS for name in bars]
    axes.barh(list(bars), list(bars.values()), color=colours)
    for at, seconds in enumerate(bars.values()):
        axes.text(seconds, at, f" {seconds:.2f} s", va="center", fontsize=POINTS)
    axes.set(xlim=(0, 1.45 * max(bars.values())), xticks=[])
    axes.invert_yaxis()
    axes.set_title(title, fontsize=POINTS, loc="right")
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def draw_ratios(panels: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """A panel per title: how many times as fast, over a size; above 1 is faster."""
    figure = new_figure(WIDTH, 2.3 * len(panels))
    for axes, (title, points) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True):
        axes.plot(range(len(points)), list(points.values()), "o-", color=RANK_COLOURS[0])
        for at, ratio in enumerate(points.values()):
            axes.annotate(f"{ratio:.2f}", (at, ratio), (0, 7), textcoords="offset points", ha="center")
        axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(points)), list(points))
        axes.margins(x=0.08, y=0.3)
        axes.set_title(title, fontsize=POINTS, loc="left")
    save(figure, path)


def draw_predicted(groups: Mapping[str, Sequence[tuple[float, float]]], title: str, band: float, path: Path) -> None:
    """Measured and predicted seconds of each group, and the band around equality."""
    figure = new_figure(WIDTH, 4.4 + 0.22 * len(groups))
    axes = figure.subplots()
    for number, (name, points) in enumerate(groups.items()):
        x, y = zip(*points, strict=True)
        style = {"marker": _MARKERS[number % len(_MARKERS)], "color": RANK_COLOURS[number], "edgecolors": "#888888"}
        axes.scatter(x, y, s=36, linewidths=0.5, label=name, **style)
    values = [value for points in groups.values() for point in points for value in point]
    ends = (min(values) / 1.2, max(values) * 1.2)
    axes.plot(ends, ends, color=INK, linewidth=0.8)
    axes.fill_between(ends, *([x * (1 + sign * band) for x in ends] for sign in (-1, 1)), color=IDLE, linewidth=0)
    ticks = [tick for tick in (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 6, 10) if ends[0] <= tick <= ends[1]]
    plain_ticks(axes, x=ticks, y=ticks)
    axes.set(xlim=ends, ylim=ends, xlabel="measured seconds", ylabel="predicted seconds")
    axes.set_title(title, fontsize=POINTS, loc="left")
    figure.legend(loc="outside lower left", fontsize=POINTS, frameon=False)
    save(figure, path)


def draw_seen(content: Mapping[str, Any], path: Path) -> None:
    """Seconds per contestant on slow links, and kernel seconds per rank, of ``seen.json``."""
    names = ("chat16", "window16")
    packs = {kind: next(p for p in content["balance"]["packs"] if p["kind"] == kind) for kind in ("chat", "long")}
    figure = new_figure(WIDTH, 2 * 2.0 + 2 * 2.9)
    panels = figure.subplots(4, 1, height_ratios=(2, 2, 2.9, 2.9))
    for axes, name in zip(panels[:2], names, strict=True):
        bars = {one["entry"].replace(":layout=", "@"): one["median"] for one in content[name]["measured"]}
        draw_seconds(axes, f"{name}, {content[name]['rate'] / 1e6:g} Mbit/s: seconds", bars, ("needed",))
    for axes, (kind, pack) in zip(panels[2:], packs.items(), strict=True):
        styles = zip((RANK_COLOURS[0], RANK_COLOURS[1], _OTHERS), "os^", strict=True)
        for (run, seconds), (colour, marker) in zip(pack["seconds"].items(), styles, strict=True):
            of_ranks = sorted(seconds, reverse=True)
            axes.plot(range(1, len(of_ranks) + 1), of_ranks, marker=marker, ms=4, label=run, color=colour)
            if run != "ring@zigzag":  # it would cover that of needed
                axes.annotate(f"{of_ranks[0]:.2g}", (1, of_ranks[0]), (7, 3), textcoords="offset points")
        axes.set_ylim(0, 1.25 * max(max(seconds) for seconds in pack["seconds"].values()))
        axes.set_xticks([1, 4, 8, 12, 16])
        axes.set_title(f"{kind}: kernel seconds, busiest rank first", fontsize=POINTS, loc="right")
        axes.legend(frameon=False, fontsize=POINTS)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
