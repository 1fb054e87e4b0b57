"""Exact gates: bytes, messages, kernel launches and peak memory of every provider must not change unnoticed.

    python ci/perf/exact.py                     compare with exact.json: PASS or FAIL, and the differences
    python ci/perf/exact.py --update            show the differences, and write

Nothing is timed: ``cp_plugin.planner.trace.program`` counts every rank's calls on tensors without data. Improvements
fail as well, so that the file always matches the code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch._dynamo  # noqa: F401  # operators on meta tensors import it, and in a trace its frames keep tensors alive
import typer
from counts import Counts, compare, lines, read

from cp_plugin.engine.attention.calls import Setup, options_of, settled_or_reason
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.trace.program import Attention, Event, Memory, Post, Products, program

FILE = Path(__file__).with_name("exact.json")
GQA = Problem(size=4, heads=16, kv_heads=4, head_dim=64, seq_length=8192)
GQA8 = replace(GQA, size=8, kv_heads=16)
PROBLEMS = {  # the first on every layout of each provider, the others on its default
    "4 ranks, 16:4 heads": (GQA, Options()),
    "8 ranks on 2 hosts, 16 heads": (GQA8.with_transport(hosts=tuple("aaaabbbb")), Options()),
    "4 ranks, window of 1024": (replace(GQA, window=(1023, 0)), Options()),
    "4 ranks, full": (replace(GQA, causal=False), Options()),
    "4 ranks, batch of 2, e4m3 payloads": (replace(GQA, batch=2), Options(fp8="comm")),
    "4 ranks, 8:4 heads, head axis of 2": (replace(GQA, heads=8), Options(head_parallel=2)),
    "4 ranks, decay of keys": (replace(GQA, kv_heads=16, decay="key"), Options()),
}


def count() -> dict[str, Counts]:
    """``problem: provider, layout`` -> totals over all ranks, and peaks of the worst; or why the provider cannot run
    it.
    """
    counts: dict[str, Counts] = {}
    for problem, (wanted, options) in PROBLEMS.items():
        kinds = ("linear",) if wanted.decay != "none" else ("softmax", "linear")
        for provider in (providers.get(name) for kind in kinds for name in providers.names(kind)):
            known = {*provider.options, *(providers.ANY_SOFTMAX if provider.kind == "softmax" else ())}
            if not options.chosen.keys() <= known:
                continue
            for layout in provider.layouts if wanted is GQA else provider.layouts[:1]:
                setup = settled_or_reason(provider, wanted, replace(options_of(provider, options), layout=layout))
                counts[f"{problem}: {provider.name}, {layout}"] = setup.reason or _count_one(setup)
    return counts


def _count_one(setup: Setup) -> dict[str, int]:
    programs = [program(setup, index) for index in range(setup.problem.size)]
    total: Counter[str] = Counter()
    for phase, axis, sent in ((*line, sent) for one in programs for line, sent in one.sent.items()):
        total[f"{phase}: bytes on {axis}"] += sent
    for phase in ("forward", "backward"):
        for event in (event for one in programs for event in getattr(one, phase)):
            for name, number in _numbers(event):
                total[f"{phase}: {name}"] += number
        total[f"{phase}: peak bytes"] = max(getattr(one.peaks, phase) for one in programs)
    total["forward: pairs of the busiest rank"] = max(one.pairs() for one in programs)
    return dict(sorted(total.items()))


def _numbers(event: Event) -> list[tuple[str, int]]:
    match event:
        case Post():
            return [(f"{event.verb} on {event.axis}", 1), ("messages", event.messages)]
        case Attention():
            return [("attention kernels", 1), ("attention tiles", len(event.shapes))]
        case Products():
            return [("matrix products", event.launches), ("flops of matrix products", event.flops)]
        case Memory():
            return [("passes over memory", event.launches), ("bytes of these passes", event.nbytes)]
    return []


def main(
    update: Annotated[bool, typer.Option("--update", help="Show what differs, and write.")] = False,
    file: Annotated[Path, typer.Option(help="The file of counts.")] = FILE,
) -> None:
    """Count what every provider does and compare with the file."""
    now = count()
    compare(read(file), now, "setup", (lambda: file.write_text(lines(now) + "\n")) if update else None)


if __name__ == "__main__":
    typer.run(main)
