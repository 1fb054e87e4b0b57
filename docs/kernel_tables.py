"""Tables of the page on kernels: the order of ``auto``, and the memory that methods need."""

from __future__ import annotations

import markdown_tables as markdown

from cp_plugin import Options, Problem
from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.kernels.backends import devices
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.trace.memory import peaks

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


def memory_table() -> str:
    """What one attention call allocates beyond its inputs on 8 and 64 ranks, by provider."""
    problems = [Problem(size=n, heads=64, kv_heads=64, head_dim=128, seq_length=2**20) for n in (8, 64)]
    rows = []
    for name in providers.names():
        cells = []
        for problem in problems:
            try:
                most = peaks(name, problem, Options(), index=problem.size - 1)
                cells += [show_bytes(most.forward), show_bytes(most.backward)]
            except ValueError:
                cells += ["cannot", "cannot"]
        own = settled(providers.get(name), problems[-1].with_transport(hosts=_HOSTS), Options())
        rows.append((f"`{name}`", *cells, own.communicators))
    titles = ("provider", "8 ranks: forward", "backward", "64 ranks: forward", "backward", "communicators")
    return markdown.table(titles, rows)
