"""The picture of a provider's traffic: the bytes of one rank, next to a ring's, from the closed formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cp_plugin.attention.setups import with_float32_sums
from cp_plugin.cli.draw.canvas import POINTS, WIDTH, new_figure, paler, plain, save
from cp_plugin.common.text import in_bytes
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Provider
from cp_plugin.testing.traffic import Row, price_one

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADS = {"MHA": (32, 32), "GQA": (32, 4), "MQA": (32, 1)}
"""Query and key/value heads: one key/value head per query head, per eight, one for all."""
RANKS_PER_HOST = 8
_PHASES = {"forward": "#2f5f93", "backward": "#e98a4b"}
_SHADES = (0.0, 0.65, 0.35, 0.8, 0.5)


def typical(size: int, kind: str) -> Problem:
    """The problem of the documentation: 131072 tokens, head size 128, bfloat16, causal, eight ranks per host."""
    heads, kv_heads = HEADS[kind]
    hosts = tuple(f"host{rank // RANKS_PER_HOST}" for rank in range(size))
    return Problem(size=size, heads=heads, kv_heads=kv_heads, seq_length=2**17, hosts=hosts)


def priced(provider: str | Provider, problem: Problem, **options: Any) -> Row:
    """What each rank sends with sums in float32, and its ratio to a ring; of no rank if the provider refuses it."""
    setup = with_float32_sums(providers.get(provider), problem, Options(**options))
    return price_one(setup, _ring(problem))


@cache
def _ring(problem: Problem) -> Row:
    return price_one(with_float32_sums(providers.get("ring"), problem, Options()))


def draw_traffic(path: Path, provider: str | Provider, sizes: Sequence[int] = (8, 64), **options: Any) -> None:
    """Write the picture to ``path`` (PNG, SVG or PDF by its suffix); ValueError if matplotlib is missing, or a name is
    unknown."""
    shown = providers.get(provider)
    compared = {"ring": ("ring", {}), shown.name: (shown, options)}
    found = [_measure(compared, size) for size in sizes]
    names = list(dict.fromkeys(axis for bars in found for bar in bars if bar.row.ranks for _, axis in bar.row.busiest))
    longest = max(bar.row.ratio or 0.0 for bars in found for bar in bars)
    height = 0.7 + 0.28 * len(HEADS) * (len(compared) + 0.5)
    figure = new_figure(WIDTH, height * len(sizes) + 0.25 * len(names) + 0.2)
    panels = figure.subplots(len(sizes), 1, squeeze=False)[:, 0]
    for axes, size, bars in zip(panels, sizes, found, strict=True):
        _draw_bars(axes, bars, names, longest)
        axes.set_title(f"{size} ranks: bytes sent, ring = 1", fontsize=POINTS, loc="left")
    handles, labels = _legend(names)
    figure.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=POINTS, frameon=False)
    save(figure, path)


class _Bar(NamedTuple):
    label: str
    at: float
    row: Row


def _measure(compared: Mapping[str, tuple[str | Provider, dict[str, Any]]], size: int) -> list[_Bar]:
    bars, at = [], 0.0
    for kind in HEADS:
        problem = typical(size, kind)
        for name, (provider, options) in compared.items():
            label = f"{name}, {kind}"
            bars.append(_Bar(label, at, priced(provider, problem, **options)))
            at += 1
        at += 0.5
    return bars


def _draw_bars(axes: Axes, bars: Sequence[_Bar], names: Sequence[str], longest: float) -> None:
    for bar in bars:
        words, ratio = "refused", bar.row.ratio or 0.0
        if bar.row.ranks:
            left = 0.0
            sent, total = bar.row.busiest, bar.row.most
            parts = sorted((phase == "backward", names.index(axis), n) for (phase, axis), n in sent.items())
            for backward, number, nbytes in parts:
                width, colour = nbytes / total * ratio, _shade("backward" if backward else "forward", number)
                axes.barh(bar.at, width, left=left, height=0.8, color=colour, edgecolor="none")
                left += width
            words = in_bytes(total) + ("" if bar.row.setup.provider.name == "ring" else f" = {ratio:.2f}x")
        axes.text(ratio + 0.02 * longest, bar.at, words, va="center", fontsize=POINTS)
    axes.set(xlim=(0, longest * 1.9), ylim=(bars[-1].at + 0.6, -0.6), xticks=[], yticks=[bar.at for bar in bars])
    axes.set_yticklabels([bar.label for bar in bars])
    plain(axes)


def _shade(phase: str, number: int) -> tuple[float, float, float]:
    return paler(_PHASES[phase], _SHADES[number % len(_SHADES)])


def _legend(names: Sequence[str]) -> tuple[list[Any], list[str]]:
    """One row for each axis (matplotlib fills a legend column by column)."""
    from matplotlib.patches import Patch

    lines = [(phase, number, axis) for phase in _PHASES for number, axis in enumerate(names)]
    return (
        [Patch(color=_shade(phase, number)) for phase, number, _ in lines],
        [f"{phase}, axis {axis}" for phase, _, axis in lines],
    )
