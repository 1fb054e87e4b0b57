"""The ``cp-plugin example`` command: published experiments for this machine and for a cluster."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cp_plugin.cli import flags
from cp_plugin.core.options import Options

if TYPE_CHECKING:
    from cp_plugin.cli.examples.command import Command
    from cp_plugin.cli.examples.config import Example

STEPS = 4
"""Iterations of a scaled run."""


class Printed(StrEnum):
    sh = "sh"
    sbatch = "sbatch"
    flags = "flags"


@flags.provider_options(without=("backend",))
def example(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="an example, or a folder with a config.yaml; default: list all")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="a variant of the example; default: its base")] = None,
    seq_length: Annotated[int | None, typer.Option(help="tokens per sequence; default: the example's first")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the whole command here, without a GPU")] = False,
    scaled: Annotated[
        int | None, typer.Option(metavar="RANKS", min=1, help="train with narrow layers on CPU ranks, against CP 1")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help=f"with --scaled: iterations; default: {STEPS}")] = None,
    printed: Annotated[
        Printed | None, typer.Option("--print", help="print the script for a node or for Slurm, or the flags")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="another method; upstream: Megatron's own")] = None,
    *,
    options: Options,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes; default: as published")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; default: as published")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Show, check, scale down or print a published experiment. After ``--``: more Megatron flags."""
    from cp_plugin.cli.examples.command import Changes
    from cp_plugin.cli.examples.config import load
    from cp_plugin.cli.examples.sizes import usable

    with flags.errors_in_one_line():
        ways = [dry_run, scaled is not None, printed is not None]
        changes = Changes(provider=provider, options=options, nodes=nodes, per_node=per_node, more=tuple(context.args))
        if sum(ways) > 1:
            raise ValueError("choose one of --dry-run, --scaled and --print")
        if scaled is None:
            flags.refuse({"--steps": steps}, "is for --scaled")
        if not any(ways) and (changes != Changes() or variant is not None or seq_length is not None):
            raise ValueError("these options have no effect on their own: add --dry-run, --scaled RANKS or --print sh")
        if name is None and any(ways):
            raise ValueError("which example? cp-plugin example lists them")
        found = load(name) if name is not None else None
        if found is None or not any(ways):
            _show(found, as_json)
            return
        command = usable(found, variant, seq_length, changes)
        if printed is not None:
            _print(command, printed)
        elif dry_run:
            _dry_run(command, as_json)
        elif scaled is not None:
            _scaled(command, scaled, steps or STEPS, as_json)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _show(example: Example | None, as_json: bool) -> None:
    """Show one example, or list all."""
    from cp_plugin.cli.examples import show
    from cp_plugin.cli.examples.config import examples

    every = list(examples()) if example is None else [example]
    if as_json:
        found = [one.model_dump(mode="json") for one in every]
        _print_json(found if example is None else found[0])
    elif example is None:
        show.print_examples(Console(), every)
    else:
        show.print_example(Console(), example)


def _print(command: Command, what: Printed) -> None:
    from cp_plugin.cli.examples.scripts import rendered

    if what == Printed.flags:
        print("\n".join(shlex.join(line) for line in command.lines))
    else:
        print(rendered(command, what.value), end="")


def _dry_run(command: Command, as_json: bool) -> None:
    from cp_plugin.cli.examples import dry_run, show

    with Console(stderr=True, quiet=as_json).status(f"checking {command.devices} ranks"):
        run = dry_run.dry_run(command)
    if as_json:
        _print_json(show.as_json(run))
    else:
        show.print_dry_run(Console(), run)
    if not run.ok:
        raise typer.Exit(1)


def _scaled(command: Command, ranks: int, steps: int, as_json: bool) -> None:
    from cp_plugin.cli.examples import scaled
    from cp_plugin.cli.examples.training import TrainingError

    of = scaled.scaled(command, ranks)
    if not as_json:
        scaled.print_changes(Console(), of)
    try:
        run = scaled.run(of, steps, Path("out", "examples"), quiet=as_json)
    except TrainingError as error:
        typer.echo(f"FAIL: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        _print_json(scaled.as_json(run))
    else:
        scaled.print_run(Console(), run)
    if run.problems:
        raise typer.Exit(1)
