"""The result of ``cp-plugin plan --explain``, as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console

from cp_plugin.cli.output import print_flags, print_lines, print_table
from cp_plugin.cli.show_plan import packed
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.planner.candidates import as_flags
from cp_plugin.planner.errors import legend, typical_error
from cp_plugin.planner.explain import RESOURCES, Explanation, split

_LEVELS = {"inter": "between nodes", "intra": "inside nodes"}
_WHERE = {
    "kernels": "kernels",
    "memory": "passes over memory",
    "host": "waits for the host",
    "waiting": "waits for messages",
    "idle": "waits for slower ranks",
}


def print_explanation(console: Console, e: Explanation) -> None:
    """The configuration, time by cause, traffic, bottlenecks, and memory."""
    setup = e.timeline.setup
    print_lines(console, *_heading(e))
    print_flags(console, "flags:", as_flags(setup), style="")
    print_lines(console, *(f"  {reason}" for reason in setup.why), legend([setup.provider.name]), "")
    ranks = ", ".join(map(str, e.timeline.programs))
    whole = len(e.timeline.programs) == e.timeline.setup.problem.size
    which = "over all ranks" if whole else f"over representative ranks {ranks} (--every-rank: all)"
    columns = ("pass", "where the time goes", "least", "median", "most", "of the pass")
    print_table(console, f"One attention call, predicted, {which}", columns, [(c, "") for c in _time_rows(e)])
    if e.sent:
        console.print()
        sent = [((phase, axis, _LEVELS[level], in_bytes(n)), "") for (phase, axis, level), n in e.sent.items()]
        print_table(console, "Bytes sent by the busiest rank", ("pass", "axis", "where", "bytes"), sent)
    console.print()
    limits = [(c, "bold" if RESOURCES[e.limit] == c[0] else "") for c in _limit_rows(e)]
    title = "What limits the call: its time if one resource took no time"
    print_table(console, title, ("free", "takes", "of now"), limits)
    console.print()
    total = e.iteration.seconds
    parts = [(name.replace("_", " "), x) for name, x in e.iteration.parts.items() if x]
    rows = [((name, in_seconds(x), f"{x / total:.1%}"), "") for name, x in parts]
    print_table(console, f"One iteration: {in_seconds(total)}", ("part", "takes", "share"), rows)
    console.print()
    memory = [((name, in_bytes(n)), "") for name, n in e.footprint.parts.items()]
    print_table(console, f"Memory per device: {_memory(e)}", ("part", "bytes"), memory)


def as_json(e: Explanation) -> dict[str, Any]:
    """Seconds and bytes."""
    setup = e.timeline.setup
    return {
        "model": e.model.name,
        "cluster": e.timeline.cluster.name,
        "parallel": asdict(e.parallel),
        "provider": setup.provider.name,
        "layout": setup.layout,
        "chosen": setup.options.chosen,
        "why": list(setup.why),
        "flags": as_flags(setup),
        "ranks": list(e.timeline.programs),
        "passes": {
            name: {"seconds": of.seconds, "by_rank": {str(rank): s._asdict() for rank, s in split(of).items()}}
            for name, of in e.passes.items()
        },
        "sent": [
            {"pass": phase, "axis": axis, "level": level, "bytes": n} for (phase, axis, level), n in e.sent.items()
        ],
        "seconds": e.timeline.seconds,
        "seconds_without": dict(e.free),
        "limit": e.limit,
        "error": typical_error(setup.provider.name),
        "iteration": {"seconds": e.iteration.seconds, "parts": e.iteration.parts},
        "attention_peaks": {str(rank): p.peaks._asdict() for rank, p in e.timeline.programs.items()},
        "memory": {"parts": e.footprint.parts, "total": e.footprint.total, "fits": e.fits},
    }


def _heading(e: Explanation) -> Iterator[str]:
    setup, p = e.timeline.setup, e.parallel
    problem = setup.problem
    yield (
        f"{e.model.name} on {p.devices} x {e.timeline.cluster.device.name} ({e.timeline.cluster.name}): "
        f"tensor {p.tensor}, context {p.context}, pipeline {p.pipeline}, data {p.data}, recomputation {p.recompute}"
    )
    yield (
        f"{problem.seq_length:,} tokens, {problem.heads} query and {problem.kv_heads} key/value heads of size "
        f"{problem.head_dim} per rank"
    )
    yield from packed(p)
    yield f"{setup.provider.name}: {setup.provider.summary}"


def _time_rows(e: Explanation) -> Iterator[tuple[str, ...]]:
    for name, of in e.passes.items():
        yield name, "all", "", "", in_seconds(of.seconds), ""
        found = split(of).values()
        for part, words in _WHERE.items():
            each = [getattr(one, part) for one in found]
            share = median(each) / of.seconds if of.seconds else 0.0
            yield "", words, *(in_seconds(x) for x in (min(each), median(each), max(each))), f"{share:.1%}"


def _limit_rows(e: Explanation) -> Iterator[tuple[str, ...]]:
    now = e.timeline.seconds
    yield "nothing", in_seconds(now), "100.0%"
    for resource, left in sorted(e.free.items(), key=lambda pair: pair[1]):
        order = "" if left <= now else " (messages arrive in another order)"
        yield RESOURCES[resource], in_seconds(left), f"{left / now:.1%}{order}"


def _memory(e: Explanation) -> str:
    has, needs = e.timeline.cluster.device.memory_bytes, e.footprint.total
    room = "fits" if e.fits else "does not fit"
    return (
        f"{in_bytes(needs)} {room} {in_bytes(has)}; attention accounts for {in_bytes(e.footprint.attention)} of it at "
        "its peak"
    )
