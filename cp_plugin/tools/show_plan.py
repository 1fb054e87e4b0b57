"""The result of ``cp-plugin plan``, and of ``--explain``, as tables and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.console import Console

from cp_plugin.engine.common.text import show_bytes, show_seconds
from cp_plugin.planner.candidates import as_flags
from cp_plugin.planner.errors import KNOWN_ERROR, legend, off_by, typical_error
from cp_plugin.planner.explain import RESOURCES, Explanation, gain, split
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.packs import balance, padded
from cp_plugin.planner.price import Priced
from cp_plugin.planner.search import Plan
from cp_plugin.planner.stock_rules import VERSION
from cp_plugin.planner.stock_rules import needed as rules_for
from cp_plugin.planner.training.model import LINEAR
from cp_plugin.planner.training.parallel import Parallel, problem
from cp_plugin.tools.output import Cells, print_flags, print_lines, print_table
from cp_plugin.tools.tables import settings

_COLUMNS = ("method", "chosen", "takes", "x best", "sends", "memory")
NOT_SEARCHED = (
    "recomputation searched: none, core_attn, layernorm, mlp, both, moe, and as few whole layers of each stage as fit; "
    "not searched: other modules, offloading activations to the host"
)


def print_plan(console: Console, plan: Plan) -> None:
    """Print a row per method, the flags to paste, and the reasons."""
    best, shape = plan.best, plan.best.parallel
    title = f"{plan.query.model.name}, {shape.seq_length:,} tokens, {shape.devices} x {plan.query.cluster.device.name}"
    print_lines(console, f"{title} ({plan.query.cluster.name}), batch {shape.global_batch}: predicted")
    by_shape: dict[str, list[Priced]] = {}
    for one in plan.methods:
        by_shape.setdefault(sizes(one.parallel), []).append(one)
    same: list[str] = []
    for which, some in by_shape.items():
        every = fold(some)
        rows = [(_cells(plan, alike, some[0]), "bold" if best in alike else "") for alike in every]
        names = [[one.candidate.name for one in alike] for alike in every if len(alike) > 1]
        same += [f"within 1 % of {first}: {', '.join(others)}" for first, *others in names]
        print_table(console, f"{which}, {recomputes(some[0].parallel)}", _COLUMNS, rows)
    terms = (
        "takes: time of one iteration; x best: relative to the fastest; sends: by one device, in one layer's attention"
    )
    off = legend(p.provider for p in plan.methods)
    said = filter(None, (kernel_time.assumed(plan.query.cluster.device), NOT_SEARCHED if plan.query.free else ""))
    print_lines(console, terms, *same, off, *said, *stock_rules(plan), *packed(shape), *_not_shown(plan), style="dim")
    console.print()
    print_flags(console, "flags:", flags(best))
    console.print()
    print_lines(console, *why(plan))


def fold(some: Sequence[Priced]) -> list[list[Priced]]:
    """Join rows of a parallel shape: of our methods, those within 1 % of the first of a row."""
    rows: list[list[Priced]] = []
    for one in some:
        first = rows[-1][0] if rows else one
        near = abs(one.iteration.seconds / first.iteration.seconds - 1) <= 0.01
        alike = recomputes(one.parallel) == recomputes(first.parallel)
        if rows and near and alike and not (one.candidate.upstream or first.candidate.upstream):
            rows[-1].append(one)
        else:
            rows.append([one])
    return rows


def stock_rules(plan: Plan) -> Iterator[str]:
    """Return what stock Megatron can do of what the model asks for, and since when."""
    letters = set(plan.query.model.attention_pattern) - {LINEAR}
    problems = [problem(plan.query.model, plan.best.parallel, letter) for letter in sorted(letters)]
    rules = dict.fromkeys(rule for one in problems for rule in rules_for(one))
    if rules and plan.best.parallel.context > 1:
        yield f"stock Megatron, with Transformer Engine {VERSION}: {'; '.join(map(str, rules))}"


def packed(p: Parallel) -> Iterator[str]:
    """The documents of a sequence, and stock Megatron's padding of them."""
    lengths, size = p.documents, p.context
    if not lengths or size == 1:
        return
    count = f"{len(lengths):,} document{'s' * (len(lengths) > 1)}"
    yield (
        f"packed: {count} in each sequence, the longest of {max(lengths):,} tokens; stock Megatron pads each to a "
        f"multiple of {2 * size}, {sum(padded(lengths, size)):,} tokens in total"
    )


def why(plan: Plan) -> Iterator[str]:
    """Return why the winner wins: its time, what ties with it, and the others' times relative to what beats them."""
    best = plan.best
    if not plan.fits(best):
        yield (
            f"warning: nothing fits {show_bytes(plan.query.memory)} of memory together with its attention; the fastest "
            f"needs {show_bytes(best.footprint.total)}"
        )
    total = best.iteration.seconds
    yield (
        f"{best.candidate.name} sends {show_bytes(best.sent)} in each layer and waits {show_seconds(best.waits_s)} of "
        f"{show_seconds(best.main.seconds)}; attention is {best.iteration.attention / total:.0%} of the iteration, "
        f"{best.tokens_per_s:,.0f} tokens/s on each device"
    )
    for reason in best.candidate.setup.why:
        yield f"  {reason}"
    if plan.tied > 1:
        names = ", ".join(p.candidate.name for p in plan.methods[1 : plan.tied])
        yield (
            f"tie: {names} take equally long within the typical error of predictions; {best.candidate.name} is named "
            "as the simplest: stock Megatron first, then what needs the fewest flags, then the fastest"
        )
    stock = next((p for p in plan.methods if p.candidate.upstream), None)
    for other in filter(plan.fits, plan.methods[plan.tied :]):
        by, seconds = plan.beating(other), other.iteration.seconds
        if by is None:  # what fits the memory is not beside what does not
            beaten = f"{seconds / plan.fastest:.2f}x the fastest's time"
        else:
            off = off_by(other.provider, by.provider)
            beaten = f"{seconds / by.iteration.seconds:.2f}x {by.candidate.name}'s time ({off})"
        causes = f": {gain(plan, best, other)}" if other is stock and not best.candidate.upstream else ""
        yield f"{other.candidate.name} takes {beaten}{causes}"
    yield (
        f"{plan.simulated} of {plan.tried} configurations simulated; those not shown are slower even at their lower "
        "bound"
    )


def _not_shown(plan: Plan) -> Iterator[str]:
    """Name the methods without a row, and why."""
    if large := [p.candidate.name for p in plan.methods if not plan.fits(p)]:
        yield f"does not fit {show_bytes(plan.query.memory)}: {', '.join(large)}"
    if plan.lost:
        bounds = ", ".join(f"{lost.name} > {lost.seconds / plan.fastest:.2f}x" for lost in plan.lost)
        yield f"not simulated, because their lower bounds are: {bounds}"
    if plan.query.allowed.refused:
        yield f"stock Megatron alone can run these flags: {plan.query.allowed.refused}"
    for name, reason in plan.cannot.items():
        yield f"{name} cannot: {reason}"


def flags(priced: Priced) -> str:
    """Return the flags for Megatron's command line."""
    p = priced.parallel
    axes = f"--tensor-model-parallel-size {p.tensor} --pipeline-model-parallel-size {p.pipeline} "
    axes += f"--context-parallel-size {p.context}"
    axes += " --sequence-parallel" if p.sequence_parallel and p.tensor > 1 else ""
    again = "" if p.recompute == "none" else f" --recompute-granularity {p.recompute}"
    if p.recompute == "selective" and p.recompute_modules != ("core_attn",):
        again += f" --recompute-modules {' '.join(p.recompute_modules)}"
    if p.recompute == "full":
        method, layers = ("block", p.recompute_layers) if p.recompute_layers else ("uniform", p.recompute_group)
        again += f" --recompute-method {method} --recompute-num-layers {layers}"
    return f"{axes}{again} {priced.candidate.flags}" if p.context > 1 else f"{axes}{again}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Return all figures, in SI units."""
    return {
        "model": plan.query.model.name,
        "documents": list(plan.best.parallel.documents),
        "cluster": plan.query.cluster.name,
        "device": plan.query.cluster.device.name,
        "memory_limit": plan.query.memory,
        "methods": [_method(plan, priced) for priced in plan.methods],
        "tied": [priced.candidate.name for priced in plan.methods[: plan.tied]],
        "error": KNOWN_ERROR,
        "not_simulated": [{"method": lost.name, "at_least_s": lost.seconds} for lost in plan.lost],
        "cannot": dict(plan.cannot),
        "refused": plan.query.allowed.refused,
        "why": list(why(plan)),
        "tried": plan.tried,
        "simulated": plan.simulated,
    }


def sizes(p: Parallel) -> str:
    """``tensor 2 x context 8 x data 4``; sizes of 1 are left out."""
    axes = {"tensor": p.tensor, "context": p.context, "pipeline": p.pipeline, "expert": p.expert, "data": p.data}
    return " x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or "one device"


def recomputes(p: Parallel) -> str:
    """``recomputes layernorm and mlp``."""
    modules = f"recomputes {' and '.join(p.recompute_modules)}"
    layers = "all layers" if not p.recompute_layers else f"{p.recompute_layers} layers" + " a stage" * (p.pipeline > 1)
    return {"none": "recomputes nothing", "selective": modules, "full": f"recomputes {layers}"}[p.recompute]


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
        "recompute_modules": list(p.recompute_modules) if p.recompute == "selective" else [],
        "recompute_layers": p.recompute_layers,
        "seconds": priced.iteration.seconds,
        "parts": dict(priced.iteration.parts),
        "repeated_attention_s": priced.repeats,
        "tokens_per_s_and_device": priced.tokens_per_s,
        "attention_forward_s": priced.main.forward.seconds,
        "attention_backward_s": priced.main.backward.seconds,
        "attention_waits_s": priced.waits_s,
        "attention_sent": priced.sent,
        "balance": balance(priced.candidate.setup) if p.documents and p.context > 1 else None,
        "memory": priced.footprint.parts,
        "typical_error": typical_error(priced.provider),
        "fits": plan.fits(priced),
    }


def _cells(plan: Plan, alike: Sequence[Priced], first: Priced) -> tuple[str, ...]:
    """Return a row, for methods within 1 % of its first one, of a table whose first row is ``first``."""
    priced = alike[0]
    again, seconds = recomputes(priced.parallel), priced.iteration.seconds
    number = plan.methods.index(priced)
    ties = plan.tied > 1 and number < plan.tied
    return (
        priced.candidate.name + (f" and {len(alike) - 1} more" if len(alike) > 1 else ""),
        settings(priced.candidate.setup) + (f", {again}" if again != recomputes(first.parallel) else ""),
        show_seconds(seconds),
        ("tie" if number else "tie, simplest") if ties else f"{seconds / plan.fastest:.2f}x",
        show_bytes(priced.sent),
        show_bytes(priced.footprint.total),
    )


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
    setup, p, now, cluster = e.timeline.setup, e.priced.parallel, e.timeline.seconds, e.timeline.cluster
    problem = setup.problem
    print_lines(
        console,
        f"{e.model.name} on {p.devices} x {cluster.device.name} ({cluster.name}): tensor {p.tensor}, context "
        f"{p.context}, pipeline {p.pipeline}, data {p.data}, recomputation {p.recompute}",
        f"{problem.seq_length:,} tokens, {problem.heads} query and {problem.kv_heads} key/value heads of size "
        f"{problem.head_dim} per rank",
        *packed(p),
        f"{setup.provider.name}: {setup.provider.summary}",
    )
    print_flags(console, "flags:", as_flags(setup), style="")
    print_lines(console, *(f"  {reason}" for reason in setup.why), legend([setup.provider.name]), "")
    ranks = ", ".join(map(str, e.timeline.programs))
    which = "over all ranks" if len(e.timeline.programs) == problem.size else f"over representative ranks {ranks}"
    columns = ("pass", "where the time goes", "least", "median", "most", "of the pass")
    print_table(console, f"One attention call, predicted, {which}", columns, _plain(_time_rows(e)))
    if e.sent:
        console.print()
        sent = ((phase, axis, _LEVELS[level], show_bytes(n)) for (phase, axis, level), n in e.sent.items())
        print_table(console, "Bytes sent by the busiest rank", ("pass", "axis", "where", "bytes"), _plain(sent))
    console.print()
    limits: list[tuple[Cells, str]] = [(("nothing", show_seconds(now), "100.0%"), "")]
    for resource, left in sorted(e.free.items(), key=lambda pair: pair[1]):
        order = "" if left <= now else " (messages arrive in another order)"
        cells = (RESOURCES[resource], show_seconds(left), f"{left / now:.1%}{order}")
        limits.append((cells, "bold" if resource == e.limit else ""))
    title = "What limits the call: its time if one resource took no time"
    print_table(console, title, ("free", "takes", "of now"), limits)
    console.print()
    total, needs = e.priced.iteration.seconds, e.priced.footprint
    taken = e.priced.iteration.parts.items()
    parts = ((name.replace("_", " "), show_seconds(x), f"{x / total:.1%}") for name, x in taken if x)
    print_table(console, f"One iteration: {show_seconds(total)}", ("part", "takes", "share"), _plain(parts))
    console.print()
    memory = ((name, show_bytes(n)) for name, n in needs.parts.items())
    title = (
        f"Memory per device: {show_bytes(needs.total)} {'fits' if e.fits else 'does not fit'} "
        f"{show_bytes(cluster.device.memory_bytes)}; attention accounts for {show_bytes(needs.attention)} of it "
        "at its peak"
    )
    print_table(console, title, ("part", "bytes"), _plain(memory))


def _plain(rows: Iterable[Cells]) -> list[tuple[Cells, str]]:
    """Rows without a style."""
    return [(cells, "") for cells in rows]


def _time_rows(e: Explanation) -> Iterator[Cells]:
    for name, of in e.passes.items():
        yield name, "all", "", "", show_seconds(of.seconds), ""
        by_rank = split(of).values()
        for part, words in _WHERE.items():
            each = [one[part] for one in by_rank]
            share = median(each) / of.seconds if of.seconds else 0.0
            yield "", words, *(show_seconds(x) for x in (min(each), median(each), max(each))), f"{share:.1%}"


def explained_as_json(e: Explanation) -> dict[str, Any]:
    """Return all figures, in seconds and bytes."""
    setup = e.timeline.setup
    return {
        "model": e.model.name,
        "cluster": e.timeline.cluster.name,
        "parallel": asdict(e.priced.parallel),
        "provider": setup.provider.name,
        "layout": setup.layout,
        "chosen": setup.options.chosen,
        "why": list(setup.why),
        "flags": as_flags(setup),
        "ranks": list(e.timeline.programs),
        "passes": {
            name: {"seconds": of.seconds, "by_rank": {str(rank): s for rank, s in split(of).items()}}
            for name, of in e.passes.items()
        },
        "sent": [
            {"pass": phase, "axis": axis, "level": level, "bytes": n} for (phase, axis, level), n in e.sent.items()
        ],
        "seconds": e.timeline.seconds,
        "seconds_without": dict(e.free),
        "limit": e.limit,
        "error": typical_error(setup.provider.name),
        "iteration": {"seconds": e.priced.iteration.seconds, "parts": e.priced.iteration.parts},
        "attention_peaks": {str(rank): p.peaks._asdict() for rank, p in e.timeline.programs.items()},
        "memory": {"parts": e.priced.footprint.parts, "total": e.priced.footprint.total, "fits": e.fits},
    }
