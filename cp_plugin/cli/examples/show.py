"""Print examples and dry runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console

from cp_plugin.cli.examples.config import Example, Experiment
from cp_plugin.cli.examples.dry_run import NOT_CHECKED, DryRun
from cp_plugin.cli.show_explained import print_memory, print_parts, print_sent
from cp_plugin.cli.terminal import Cells, print_lines, print_table, print_verdict
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.planner.errors import SECONDS


def print_examples(console: Console, examples: Iterable[Example]) -> None:
    rows = [(_row(example), "") for example in examples]
    print_table(console, "Examples", ("name", "GPUs", "method", "tokens", "variants", "what"), rows)
    _line(console, "\nMore about one of them: cp-plugin example NAME")


def print_example(console: Console, example: Example) -> None:
    config, name = example.config, example.name
    _line(console, f"{config.title} ({config.paper}{', ' + config.section if config.section else ''})\n")
    for paragraph in config.about.strip().split("\n\n"):
        _line(console, " ".join(paragraph.split()) + "\n")
    rows = [(_variant_row(example.experiment(variant)), "") for variant in example.variants]
    print_table(console, "Variants", ("variant", "model", "GPUs", "method", "tokens"), rows)
    _line(console, "")
    ways = [
        ("--dry-run", "check the whole command here, without a GPU"),
        ("--scaled", "train with narrow layers on CPU ranks here, and compare with CP 1"),
        ("--print sh", "the script for each node; --print sbatch: for Slurm"),
    ]
    if example.config.variants:
        other = example.experiment(example.variants[-1])
        ways.append((f"... --variant {other.variant} --seq-length {other.lengths[-1]}", "another variant and length"))
    print_table(console, f"Next: cp-plugin example {name}", ("with", "what it does"), [(way, "") for way in ways])


def print_dry_run(console: Console, run: DryRun) -> None:
    """The command, its groups, memory, bytes and time, and what was not checked."""
    print_lines(console, *_heading(run), "")
    _print_groups(console, run)
    _line(console, "")
    p = run.prediction
    print_memory(console, f"Memory per GPU, predicted: {_memory(run)}", p.priced.footprint)
    _line(console, "")
    total = in_bytes(sum(p.sent.values()))
    title = f"Sent for attention in one iteration by the rank that sends most: {total}"
    print_sent(console, title, sorted(p.sent.items(), key=str))
    _line(console, "")
    title = (
        f"One iteration, predicted (typical error {100 * SECONDS:.0f} %): {in_seconds(p.priced.iteration.seconds)}, "
        f"{p.tokens_per_s:,.0f} tokens/s, "
        f"{p.utilisation:.1%} of the GPU's rate for large matrices"
    )
    print_parts(console, title, p.priced.iteration)
    _line(console, f"\n{NOT_CHECKED}")
    for fault in run.faults:
        _line(console, f"process groups: {fault}", "red")
    print_verdict(run.ok, verdict(run), console)


def verdict(run: DryRun) -> str:
    wrong = [f"{len(run.faults)} faults in the process groups"] * bool(run.faults)
    wrong += [f"does not fit in memory: {_memory(run)}"] * (not run.prediction.fits)
    where = f"{run.command.experiment.name} ({run.command.experiment.variant}) on {run.command.devices} GPUs"
    return f"{where}: {'; '.join(wrong) or 'flags accepted by Megatron, process groups correct, fits in memory'}"


def as_json(run: DryRun) -> dict[str, Any]:
    """Bytes and seconds."""
    p, command = run.prediction, run.command
    return {
        "example": command.experiment.name,
        "variant": command.experiment.variant,
        "nodes": command.nodes,
        "per_node": command.per_node,
        "seq_length": command.seq_length,
        "flags": command.flags,
        "notes": list(command.notes),
        "why": list(dict.fromkeys([*run.why, *p.why])),
        "cluster": p.cluster.name,
        "parallel": asdict(p.parallel),
        "groups": [group._asdict() for group in run.groups],
        "faults": list(run.faults),
        "memory": {
            "parts": p.priced.footprint.parts,
            "total": p.priced.footprint.total,
            "device": p.cluster.device.memory_bytes,
            "fits": p.fits,
        },
        "sent": [
            {"pass": phase, "axis": axis, "level": level, "bytes": n} for (phase, axis, level), n in p.sent.items()
        ],
        "iteration": {"seconds": p.priced.iteration.seconds, "parts": p.priced.iteration.parts},
        "tokens_per_s": p.tokens_per_s,
        "share_of_matrix_rate": p.utilisation,
        "not_checked": NOT_CHECKED,
        "ok": run.ok,
    }


def _heading(run: DryRun) -> Iterator[str]:
    command, p = run.command, run.prediction
    yield f"{command.experiment.config.title}, variant {command.experiment.variant}"
    yield (
        f"{command.nodes} x {command.per_node} {p.cluster.device.name} ({p.cluster.name}): tensor {p.parallel.tensor}, "
        f"context {p.parallel.context}, pipeline {p.parallel.pipeline}, data {p.parallel.data}; "
        f"{command.seq_length:,} tokens, {p.parallel.tokens:,} per GPU"
    )
    yield from command.notes
    if command.value("cp-provider") or command.value("cp-linear-attention"):
        setups = [timeline.setup for timeline in p.priced.timelines.values()]
        yield "method: " + "; ".join(f"{s.provider.name} {s.layout} {s}".strip() for s in setups)
    for reason in p.why or run.why:  # on the cluster, if the planner knows
        yield f"  {reason}"


def _print_groups(console: Console, run: DryRun) -> None:
    rows: list[tuple[Cells, str]] = []
    for group in run.groups:
        inside = "all" if group.inside == group.groups else str(group.inside) if group.inside else "none"
        ranks = ", ".join(map(str, group.example[:10])) + (", ..." if len(group.example) > 10 else "")
        cells = (group.name, str(group.groups), str(group.size), inside, ranks, "yes" if group.exchanged else "")
        rows.append((cells, ""))
    title = f"Process groups of {run.command.devices} ranks" + (": WRONG" if run.faults else "")
    print_table(console, title, ("group", "how many", "ranks", "inside a node", "the first", "exchanged"), rows)


def _memory(run: DryRun) -> str:
    p = run.prediction
    has, needs = p.cluster.device.memory_bytes, p.priced.footprint.total
    return f"{in_bytes(needs)} of {in_bytes(has)}"


def _row(example: Example) -> Cells:
    base = example.experiment()
    others = ", ".join(example.variants[1:])
    return (example.name, str(base.devices), _provider(base), _lengths(base), others, example.config.title)


def _variant_row(one: Experiment) -> Cells:
    return (one.variant, one.planner_model, str(one.devices), _provider(one), _lengths(one))


def _provider(one: Experiment) -> str:
    flags = one.flags
    linear, pattern = flags.get("cp-linear-attention"), str(flags.get("cp-layer-pattern", "L"))
    if not linear:
        return str(flags.get("cp-provider", "upstream"))
    found = f"{flags.get('cp-linear-provider', 'lasp2')} ({linear}, {pattern})"
    return f"{found}, {flags.get('cp-provider', 'all_gather')}" if "N" in pattern else found


def _lengths(one: Experiment) -> str:
    few = [_tokens(n) for n in (min(one.lengths), max(one.lengths))]
    return few[0] if few[0] == few[1] else " to ".join(few)


def _tokens(n: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if n % size == 0:
            return f"{n // size}{unit}"
    return f"{n:,}"


def _line(console: Console, text: str, style: str = "") -> None:
    print_lines(console, text, style=style)
