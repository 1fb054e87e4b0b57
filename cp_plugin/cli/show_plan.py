"""The result of ``cp-plugin plan``, as a table and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Console

from cp_plugin.attention.setups import Setup
from cp_plugin.cli.terminal import print_lines, print_table
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.planner.packs import balance, padded
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import KNOWN, KNOWN_ERROR, Plan, over
from cp_plugin.planner.training.parallel import Parallel

_COLUMNS = ("method", "chosen", "takes", "x best", "sends", "memory")
ERROR = f"{KNOWN}: half of the published pairs of methods are predicted within that; seconds are off by more"
"""The uncertainty of predictions."""
_SHORT = {"head parallel": "heads", "head groups": "groups", "intra size": "inner", "backward": "send", "grid ": ""}


def print_plan(console: Console, plan: Plan) -> None:
    """A row per method, the flags to paste, and the reasons."""
    best, shape = plan.best, plan.best.parallel
    rows = [(_cells(plan, i), "bold" if i == 0 else "") for i in range(len(plan.found))]
    title = (
        f"{plan.model.name}, {shape.seq_length:,} tokens, {shape.devices} x {plan.cluster.device.name} "
        f"({plan.cluster.name}), {in_words(shape)}: predicted"
    )
    print_table(console, title, _COLUMNS, rows)
    legend = "takes: one iteration; x best: of the fastest's time; sends: one device, in one layer's attention"
    print_lines(console, legend, ERROR, *packed(shape), *_not_shown(plan), style="dim")
    print_lines(console, f"\nflags: {flags(best)}\n", style="bold green", whole=True)
    print_lines(console, *why(plan))


def packed(p: Parallel) -> Iterator[str]:
    """The documents of a sequence, and upstream's padding of them."""
    lengths, size = p.documents, p.context
    if not lengths or size == 1:
        return
    count = f"{len(lengths):,} document{'s' * (len(lengths) > 1)}"
    yield (
        f"packed: {count} in each sequence, the longest of {max(lengths):,} tokens; upstream pads each to a multiple "
        f"of {2 * size}, {sum(padded(lengths, size)):,} tokens together"
    )


def why(plan: Plan) -> Iterator[str]:
    """Why the winner wins: its time, and what makes the others slower."""
    best = plan.best
    if not plan.fits(best):
        yield (
            f"warning: nothing fits {in_bytes(plan.limit)} of memory together with its attention; this needs least "
            f"time and {in_bytes(best.footprint.total)}"
        )
    total = best.iteration.seconds
    yield (
        f"{best.candidate.name} sends {in_bytes(best.sent)} in each layer and waits {in_seconds(best.waits_s)} of "
        f"{in_seconds(best.main.seconds)}; attention is {best.iteration.attention / total:.0%} of the iteration, "
        f"{best.tokens_per_s:,.0f} tokens/s on each device"
    )
    for reason in best.candidate.setup.why:
        yield f"  {reason}"
    if plan.tied > 1:
        names = ", ".join(p.candidate.name for p in plan.found[1 : plan.tied])
        yield (
            f"tie: {names} take as long within {KNOWN_ERROR:.0%}, no more than predictions are off; "
            f"{best.candidate.name} sends fewest bytes"
        )
    for other in plan.found[plan.tied :]:
        parts = []
        if other.repeats > 0.005 * total:
            parts.append(
                "repeats attention under recomputation, as stock Megatron does "
                f"({other.without_repeats / plan.fastest:.2f}x where memory allows not to)"
            )
        if other.waits_s > 1.1 * best.waits_s:
            parts.append(f"waits {in_seconds(other.waits_s)} in each layer")
        computing = _computing(other) / _computing(best)
        if computing > 1.01:
            parts.append(f"keeps its busiest device computing {computing:.2f}x as long")
        if other.sent > 1.05 * best.sent:
            parts.append(f"sends {other.sent / max(1, best.sent):.1f}x as much")
        slower = other.iteration.seconds / plan.fastest
        yield f"{other.candidate.name} takes {slower:.2f}x {KNOWN}: {', '.join(parts) or 'a little of everything'}"
    yield f"{plan.simulated} of {plan.tried} configurations simulated; those not shown are slower even at best"


def _not_shown(plan: Plan) -> Iterator[str]:
    """The methods without a row, and why."""
    if large := [p.candidate.name for p in plan.found if not plan.fits(p)]:
        yield f"does not fit {in_bytes(plan.limit)}: {', '.join(large)}"
    if plan.lost:
        bounds = ", ".join(f"{lost.name} > {lost.seconds / plan.fastest:.2f}x" for lost in plan.lost)
        yield f"not simulated, since they take at least: {bounds}"
    for name, reason in plan.cannot.items():
        yield f"{name} cannot: {reason}"


def flags(priced: Priced) -> str:
    """The flags for Megatron's command line."""
    p = priced.parallel
    sizes = f"--tensor-model-parallel-size {p.tensor} --pipeline-model-parallel-size {p.pipeline} "
    sizes += f"--context-parallel-size {p.context}"
    sizes += " --sequence-parallel" if p.sequence_parallel and p.tensor > 1 else ""
    again = "" if p.recompute == "none" else f" --recompute-granularity {p.recompute}"
    again += " --recompute-method uniform --recompute-num-layers 1" if p.recompute == "full" else ""
    return f"{sizes}{again} {priced.candidate.flags}" if p.context > 1 else f"{sizes}{again}"


def as_json(plan: Plan) -> dict[str, Any]:
    """SI units."""
    return {
        "model": plan.model.name,
        "documents": list(plan.best.parallel.documents),
        "cluster": plan.cluster.name,
        "device": plan.cluster.device.name,
        "memory_limit": plan.limit,
        "methods": [_method(plan, priced) for priced in plan.found],
        "tied": [priced.candidate.name for priced in plan.found[: plan.tied]],
        "error": KNOWN_ERROR,
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
        "repeated_attention_s": priced.repeats,
        "tokens_per_s_and_device": priced.tokens_per_s,
        "attention_forward_s": priced.main.forward_s,
        "attention_backward_s": priced.main.backward_s,
        "attention_waits_s": priced.waits_s,
        "attention_sent": priced.sent,
        "balance": balance(priced.candidate.setup) if p.documents and p.context > 1 else None,
        "memory": priced.footprint.parts,
        "fits": plan.fits(priced),
    }


def _cells(plan: Plan, number: int) -> tuple[str, ...]:
    priced = plan.found[number]
    seconds, sends = priced.iteration.seconds, " fp8" if priced.candidate.setup.options.fp8 else ""
    return (
        priced.candidate.name + sends,
        chosen(priced.candidate.setup),
        in_seconds(seconds),
        over(seconds, plan.fastest, alone=plan.tied == 1),
        in_bytes(priced.sent),
        in_bytes(priced.footprint.total),
    )


def chosen(setup: Setup) -> str:
    """``zigzag, 8x2, heads 4, groups 8``: abbreviated for a terminal; the flags are complete."""
    told = replace(setup, options=replace(setup.options, fp8=None, gradient_dtype=None))
    words = f"{setup.layout}, {told}".removesuffix(", ").replace(", backward kv", "")
    for long, short in _SHORT.items():
        words = words.replace(long, short)
    return words


def _computing(priced: Priced) -> float:
    timeline = priced.main
    return max(timeline.seconds - idle for idle in timeline.idle_s.values())
