"""Tables of the page on kernels: the order of ``auto``, the calls methods make, and the memory they need."""

from __future__ import annotations

from dataclasses import replace

import markdown_tables as markdown

from cp_plugin import Options, Problem
from cp_plugin.attention.setups import settled
from cp_plugin.attention.traced_blocks import asked_of
from cp_plugin.common.text import in_bytes
from cp_plugin.kernels.backends import devices
from cp_plugin.kernels.blocks import LONG
from cp_plugin.kernels.cost import Cost, cost, speeds_on
from cp_plugin.methods import registry as providers
from cp_plugin.planner.trace.memory import peaks

_TOKENS = (512, 8192)
"""Per rank."""
_HOSTS = tuple(f"node{rank // 8}" for rank in range(64))


def order_table() -> str:
    """What ``auto`` tries on each family of GPUs, with the rates that order it."""
    rows: list[tuple[object, ...]] = []
    shown: set[object] = set()
    for family in devices.FAMILIES[1:]:
        rows.append((f"{family.title}, from {'.'.join(map(str, family.since))}", "", "", "", family.order_source))
        if family.order in shown:
            continue
        shown.add(family.order)
        tried = [(number, f"`{c.title}`", c.rate, c.source) for number, c in enumerate(family.order, start=1)]
        own = [("", "ours (target)", family.scale.own, family.scale.source)] if family.scale is not None else []
        for number, title, rate, source in (*tried, *own):
            if rate is not None:
                rows.append(("", number, title, f"{rate.forward:g} / {rate.backward:g}", source))
    return markdown.table(("GPU", "order", "kernel", "TFLOP/s, forward / backward", "source"), rows)


def calls_table() -> str:
    """The forward's blocks on a middle rank of 8 on Hopper, and who computes them, by provider and layout."""
    rows = []
    for name in providers.names():
        for layout in providers.get(name).layouts:
            found = [_costs(name, layout, tokens) for tokens in _TOKENS]
            calls = sum(each.tiles or 0 for each in found[-1])
            split = [sum(c.by_library == library for c in costs) for costs in found for library in (True, False)]
            rows.append((f"`{name}`", layout, len(found[-1]), calls, *split))
    sizes = [title for tokens in _TOKENS for title in (f"{tokens:,} tokens per rank: library", "ours")]
    return markdown.table(("provider", "layout", "blocks", "library kernel calls", *sizes), rows)


def _costs(name: str, layout: str, tokens: int) -> list[Cost]:
    """Of the forward's visible blocks, on an H100 with flash-attn 3."""
    speeds = speeds_on(devices.family((9, 0)), "flash", 3)
    problem = Problem(size=8, heads=32, kv_heads=8, head_dim=128, seq_length=8 * tokens)
    options = Options(layout=layout, head_groups=1 if "head_groups" in providers.get(name).options else None)
    costs = (cost(*a.block, a.sizes, speeds, LONG) for a in asked_of(name, problem, options, 5))
    return [found for found in costs if found.tiles]


def memory_table() -> str:
    """What one attention call allocates beyond its inputs on 8 and 64 ranks, by provider."""
    problems = [Problem(size=n, heads=64, kv_heads=64, head_dim=128, seq_length=2**20) for n in (8, 64)]
    rows = []
    for name in providers.names():
        cells = []
        for problem in problems:
            try:
                found = peaks(name, problem, Options(), index=problem.size - 1)
                cells += [in_bytes(found.forward), in_bytes(found.backward)]
            except ValueError:
                cells += ["cannot", "cannot"]
        own = settled(providers.get(name), replace(problems[-1], hosts=_HOSTS), Options())
        rows.append((f"`{name}`", *cells, own.communicators))
    titles = ("provider", "8 ranks: forward", "backward", "64 ranks: forward", "backward", "communicators")
    return markdown.table(titles, rows)
