"""The ``cp-plugin example`` command: tables of published experiments, and Megatron's flags or the self-contained script
of one, which runs on every node."""

from __future__ import annotations

import shlex
from enum import StrEnum
from importlib.resources import files
from typing import Annotated

import typer
from rich.console import Console

from cp_plugin.tools import flags
from cp_plugin.tools.examples.config import BASE, Experiment, experiment, load, names, words
from cp_plugin.tools.output import new_console, print_lines, print_table

Printed = StrEnum("Printed", ["sh", "flags"])


def example(
    name: Annotated[str | None, typer.Argument(help="an example; default: list all")] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="a variant of the example; default: its first")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="tokens of one sequence; default: the example's first length")
    ] = None,
    printed: Annotated[
        Printed | None, typer.Option("--print", help="print the script for each node (sh), or only the flags")
    ] = None,
) -> None:
    """Show or print a published experiment."""
    with flags.errors_in_one_line():
        if printed is None:
            flags.refuse(
                {"--variant": variant, "--seq-length": seq_length}, "has no effect without --print sh or flags"
            )
            if name is None:
                print_examples(new_console())
            else:
                print_example(new_console(), name)
            return
        if name is None:
            raise ValueError("NAME is missing: cp-plugin example shows all examples")
        chosen = experiment(name, variant or BASE)
        if printed == Printed.flags:
            print("\n".join(shlex.join(line) for line in words(chosen.with_length(seq_length))))
        else:
            print(render(chosen, seq_length), end="")


def print_examples(console: Console) -> None:
    rows = []
    for name in names():
        base, *others = load(name).values()
        variants = ", ".join(one.variant for one in others)
        rows.append(((name, str(base.devices), _provider(base), _lengths(base), variants, base.title), ""))
    print_table(console, "Examples", ("name", "GPUs", "method", "tokens", "variants", "what"), rows)
    print_lines(console, "\nMore about one of them: cp-plugin example NAME")


def print_example(console: Console, name: str) -> None:
    base, *others = every = list(load(name).values())
    print_lines(console, f"{base.title} ({base.paper}{', ' + base.section if base.section else ''})\n")
    for paragraph in base.about.strip().split("\n\n"):
        print_lines(console, " ".join(paragraph.split()) + "\n")
    rows = [((one.variant, one.planner_model, str(one.devices), _provider(one), _lengths(one)), "") for one in every]
    print_table(console, "Variants", ("variant", "model", "GPUs", "method", "tokens"), rows)
    other = others[-1] if others else base
    print_lines(
        console,
        f"\nNext: cp-plugin example {base.name} --print sh: the script for each node; --print flags: Megatron's "
        f"flags; of another variant or length: --variant {other.variant} --seq-length {other.lengths[-1]}",
    )


def render(experiment: Experiment, seq_length: int | None = None) -> str:
    """Return ``train.sh`` with the experiment's flags."""
    chosen = experiment.with_length(seq_length)
    fields = {
        "title": experiment.title,
        "name": experiment.name,
        "variant": shlex.quote(experiment.variant),
        "nodes": str(experiment.cluster.nodes),
        "per_node": str(experiment.cluster.per_node),
        "flags": "\n".join(f"  {shlex.join(line)}" for line in words(chosen)),
        "connections": "8" if chosen.get("use-megatron-fsdp") else "1",
    }
    text = files("cp_plugin.tools.examples").joinpath("train.sh").read_text(encoding="utf-8")
    for field, value in fields.items():
        text = text.replace(f"@{field}@", value)
    return text


def _provider(one: Experiment) -> str:
    own = one.flags
    linear, pattern = own.get("cp-linear-attention"), str(own.get("cp-layer-pattern", "L"))
    if not linear:
        return str(own.get("cp-provider", "upstream"))
    method = f"{own.get('cp-linear-provider', 'lasp2')} ({linear}, {pattern})"
    return f"{method}, {own.get('cp-provider', 'all_gather')}" if "N" in pattern else method


def _lengths(one: Experiment) -> str:
    """``128k to 2M``."""
    ends = dict.fromkeys((min(one.lengths), max(one.lengths)))
    return " to ".join(
        f"{n // 2**20}M" if n % 2**20 == 0 else f"{n // 2**10}k" if n % 2**10 == 0 else f"{n:,}" for n in ends
    )
