"""How ``cp-plugin plan`` shows what it found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from cp_plugin.cli.tables import print_table
from cp_plugin.core.text import in_bytes, in_seconds
from cp_plugin.planner.parallel import Parallel
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import Plan

_FIRST = ("method", "chosen", "layout")
_COLUMNS = (*_FIRST, "iteration", "of the best", "tokens/s", "attention", "waits", "sends", "memory", "note")


def print_plan(console: Console, plan: Plan) -> None:
    """A line per method, the flags to paste, and why."""
    best, shape = plan.best, plan.best.parallel
    rows = [(_cells(plan, priced), "bold" if priced is best else "") for priced in plan.found]
    rows += [
        ((lost.name, "", "", f"> {in_seconds(lost.seconds)}", f"> {lost.seconds / best.iteration.seconds:.2f}x",
          *[""] * 5, "not simulated: what it takes at least"), "dim")
        for lost in plan.lost
    ]  # fmt: skip
    rows += [((name, *[""] * 9, f"cannot: {reason}"), "dim") for name, reason in plan.cannot.items()]
    title = (
        f"{plan.model.name}, {shape.seq_length:,} tokens, {shape.devices} x {plan.cluster.device.name} "
        f"({plan.cluster.name}), {in_words(shape)}: predicted"
    )
    print_table(console, title, _COLUMNS, rows)
    console.print(
        "iteration: seconds of one, all parts; attention: its share; waits: for messages, in one layer's attention; "
        "sends: from one device, one layer",
        highlight=False,
        style="dim",
    )
    console.print(f"\nflags: {flags(best)}\n", style="bold green", highlight=False, soft_wrap=True)
    for line in why(plan):
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def why(plan: Plan) -> Iterator[str]:
    """Why the winner wins: what it takes, and what the others take longer for."""
    best = plan.best
    if not plan.fits(best):
        yield (
            f"warning: nothing fits {in_bytes(plan.limit)} of memory together with its attention; this needs least "
            f"time and {in_bytes(best.footprint.total)}"
        )
    total = best.iteration.seconds
    yield (
        f"{best.candidate.name} sends {in_bytes(best.sent)} in each layer and waits {in_seconds(best.waits_s)} of "
        f"{in_seconds(best.main.seconds)}; attention is {best.iteration.attention / total:.0%} of the iteration"
    )
    for reason in best.candidate.setup.why:
        yield f"  {reason}"
    for other in plan.found[1:]:
        slower = other.iteration.seconds / total
        if slower < 1.005:
            yield f"{other.candidate.name} is as fast within half a per cent"
            continue
        parts = []
        if other.waits_s > 1.1 * best.waits_s:
            parts.append(f"waits {in_seconds(other.waits_s)} in each layer")
        computing = _computing(other) / _computing(best)
        if computing > 1.01:
            parts.append(f"keeps its busiest device computing {computing:.2f}x as long")
        if other.sent > 1.05 * best.sent:
            parts.append(f"sends {other.sent / max(1, best.sent):.1f}x as much")
        yield f"{other.candidate.name} takes {slower:.2f}x: {', '.join(parts) or 'a little of everything'}"
    yield f"{plan.simulated} timelines simulated, of {plan.tried} ways to do it; what is not shown takes longer at best"


def flags(priced: Priced) -> str:
    """What to write on Megatron's command line."""
    p = priced.parallel
    sizes = f"--tensor-model-parallel-size {p.tensor} --pipeline-model-parallel-size {p.pipeline} "
    sizes += f"--context-parallel-size {p.context}"
    sizes += " --sequence-parallel" if p.sequence_parallel and p.tensor > 1 else ""
    again = "" if p.recompute == "none" else f" --recompute-granularity {p.recompute}"
    again += " --recompute-method uniform --recompute-num-layers 1" if p.recompute == "full" else ""
    return f"{sizes}{again} {priced.candidate.flags}" if p.context > 1 else f"{sizes}{again}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, in SI units."""
    return {
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "device": plan.cluster.device.name,
        "memory_limit": plan.limit,
        "methods": [_method(plan, priced) for priced in plan.found],
        "not_simulated": [{"method": lost.name, "at_least_s": lost.seconds} for lost in plan.lost],
        "cannot": dict(plan.cannot),
        "why": list(why(plan)),
        "tried": plan.tried,
        "simulated": plan.simulated,
    }


def in_words(p: Parallel) -> str:
    """``tensor 2 x context 8 x data 4, recomputation full``."""
    sizes = {"tensor": p.tensor, "context": p.context, "pipeline": p.pipeline, "expert": p.expert, "data": p.data}
    shown = " x ".join(f"{name} {n}" for name, n in sizes.items() if n > 1) or "one device"
    return f"{shown}, batch {p.global_batch}" + ("" if p.recompute == "none" else f", recomputation {p.recompute}")


def _method(plan: Plan, priced: Priced) -> dict[str, Any]:
    p = priced.parallel
    return {
        "method": priced.candidate.name,
        "layout": priced.candidate.setup.layout,
        "chosen": priced.candidate.setup.options.chosen,
        "flags": flags(priced),
        "tensor": p.tensor,
        "pipeline": p.pipeline,
        "context": p.context,
        "data": p.data,
        "recompute": p.recompute,
        "seconds": priced.iteration.seconds,
        "parts": dict(priced.iteration.parts),
        "tokens_per_s_and_device": priced.tokens_per_s,
        "attention_forward_s": priced.main.forward_s,
        "attention_backward_s": priced.main.backward_s,
        "attention_waits_s": priced.waits_s,
        "attention_sent": priced.sent,
        "memory": priced.footprint.parts,
        "fits": plan.fits(priced),
    }


def _cells(plan: Plan, priced: Priced) -> tuple[str, ...]:
    setup, seconds = priced.candidate.setup, priced.iteration.seconds
    return (
        priced.candidate.name,
        str(setup),
        setup.layout,
        in_seconds(seconds),
        f"{seconds / plan.best.iteration.seconds:.2f}x",
        f"{priced.tokens_per_s:,.0f}",
        f"{priced.iteration.attention / seconds:.0%}",
        in_seconds(priced.waits_s),
        in_bytes(priced.sent),
        in_bytes(priced.footprint.total),
        "" if plan.fits(priced) else f"does not fit {in_bytes(plan.limit)}",
    )


def _computing(priced: Priced) -> float:
    timeline = priced.main
    return max(timeline.seconds - idle for idle in timeline.idle_s.values())
