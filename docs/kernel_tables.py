"""The tables of the page on kernels: what ``auto`` takes where, how many calls methods make, the memory they need."""

from __future__ import annotations

from dataclasses import replace

import markdown_tables as markdown

from cp_plugin import Options, Problem
from cp_plugin.attention.setups import settled
from cp_plugin.attention.traced_blocks import asked_of
from cp_plugin.core.text import in_bytes
from cp_plugin.kernels.backends import devices
from cp_plugin.kernels.blocks import LONG
from cp_plugin.kernels.cost import Cost, cost, speeds_on
from cp_plugin.methods import registry as providers
from cp_plugin.planner.trace.memory import peaks

_TOKENS = (512, 8192)
"""Of each rank."""


def order_table() -> str:
    """Per family of GPUs: what ``auto`` tries, with the figures of the table that orders it."""
    rows = []
    shown: set[object] = set()
    for family in devices.FAMILIES[1:]:
        where = f"{family.title}, from {'.'.join(map(str, family.since))}"
        rows.append((where, "", "", "", family.order_source))
        if family.order in shown:
            continue
        shown.add(family.order)
        for number, candidate in enumerate(family.order, start=1):
            if candidate.rate is not None:
                rates = f"{candidate.rate.forward:g} / {candidate.rate.backward:g}"
                rows.append(("", number, f"`{candidate.title}`", rates, candidate.source))
        if family.scale is not None:
            rates = f"{family.scale.own.forward:g} / {family.scale.own.backward:g}"
            rows.append(("", "", "ours, as expected", rates, family.scale.source))
    return markdown.table(("GPU", "order", "kernel", "TFLOP/s, forward / backward", "source"), rows)


def calls_table() -> str:
    """Per provider and layout: blocks of the forward of a middle rank of 8 on Hopper, and who gets them."""
    rows = []
    for name in providers.names():
        for layout in providers.get(name).layouts:
            found = [_costs(name, layout, tokens) for tokens in _TOKENS]
            calls = sum(each.tiles or 0 for each in found[-1])
            split = [sum(c.by_library == library for c in costs) for costs in found for library in (True, False)]
            rows.append((f"`{name}`", layout, len(found[-1]), calls, *split))
    sizes = [title for tokens in _TOKENS for title in (f"{tokens:,} tokens a rank: a library's", "ours")]
    return markdown.table(("provider", "tokens", "blocks", "calls of a library's kernel", *sizes), rows)


def _costs(name: str, layout: str, tokens: int) -> list[Cost]:
    """Of every block of the forward that any query sees a key of, on an H100 with flash-attn 3."""
    speeds = speeds_on(devices.family((9, 0)), "flash", 3)
    problem = Problem(size=8, heads=32, kv_heads=8, head_dim=128, seq_length=8 * tokens)
    grouped = "head_groups" in providers.get(name).options
    options = Options(layout=layout, head_groups=1 if grouped else None)
    costs = (cost(*a.block, a.sizes, speeds, LONG) for a in asked_of(name, problem, options, 5))
    return [found for found in costs if found.tiles]


def memory_table() -> str:
    """Per provider: what one attention call makes beside its inputs, on 8 and 64 ranks."""
    rows = []
    for name in providers.names():
        cells = []
        for size in (8, 64):
            problem = Problem(size=size, heads=64, kv_heads=64, head_dim=128, seq_length=2**20)
            try:
                found = peaks(name, problem, Options(), index=size - 1)
            except ValueError:
                cells += ["cannot", "cannot"]
                continue
            cells += [in_bytes(found.forward), in_bytes(found.backward)]
        own = settled(providers.get(name), replace(problem, hosts=_HOSTS), Options())
        rows.append((f"`{name}`", *cells, own.communicators))
    titles = ("provider", "8 ranks: forward", "backward", "64 ranks: forward", "backward", "communicators")
    return markdown.table(titles, rows)


_HOSTS = tuple(f"node{rank // 8}" for rank in range(64))
