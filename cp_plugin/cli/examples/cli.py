"""The ``cp-plugin example`` command: published experiments for this machine and for a cluster."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.cli import flags, output
from cp_plugin.cli.terminal import new_console
from cp_plugin.common.text import in_words
from cp_plugin.core.options import Options

if TYPE_CHECKING:
    from cp_plugin.cli.examples.command import Changes, Command
    from cp_plugin.cli.examples.config import Example

RANKS, STEPS = 8, 4
"""CPU ranks and iterations of a scaled run."""


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
    listed: Annotated[bool, typer.Option("--list", help="list all examples")] = False,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="a variant of the example; default: its first")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="tokens of one sequence; default: the example's first length")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the whole command here, without a GPU")] = False,
    scaled: Annotated[
        bool, typer.Option("--scaled", help="train with narrow layers on CPU ranks here, and compare with CP 1")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help=f"with --scaled: ranks to start on this machine; default: {RANKS}")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help=f"with --scaled: iterations; default: {STEPS}")] = None,
    printed: Annotated[
        Printed | None,
        typer.Option("--print", help="print the script for one node (sh) or for Slurm (sbatch), or only the flags"),
    ] = None,
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="another method; upstream: stock Megatron")
    ] = None,
    *,
    options: Options,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes; default: as published")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs per node; default: as published")] = None,
    as_json: output.AsJson = None,
) -> None:
    """Show, check, scale down or print a published experiment; Megatron flags after ``--`` override its own."""
    from cp_plugin.cli.examples.command import Changes
    from cp_plugin.cli.examples.config import load
    from cp_plugin.cli.examples.sizes import usable

    with flags.errors_in_one_line(translated=not context.args):
        ways = [dry_run, scaled, printed is not None]
        changes = Changes(provider=provider, options=options, nodes=nodes, per_node=per_node, more=tuple(context.args))
        if sum(ways) > 1:
            raise ValueError("choose one of --dry-run, --scaled and --print")
        if not scaled:
            flags.refuse({"--ranks": ranks, "--steps": steps}, "has no effect without --scaled")
        if listed and (name is not None or any(ways)):
            raise ValueError("--list shows all examples: leave the other arguments out")
        if not any(ways) and (given := _given(variant, seq_length, changes)):
            effect = "have no effect" if len(given) > 1 else "has no effect"
            raise ValueError(f"{', '.join(given)} {effect} alone: add --dry-run, --scaled or --print sh")
        if printed is not None and as_json is not None:
            raise ValueError(f"--json has no effect with --print {printed}: leave one of the two out")
        if name is None and any(ways):
            raise ValueError("NAME is missing: cp-plugin example --list shows all examples")
        found = load(name) if name is not None else None
        if found is None or not any(ways):
            _show(found, as_json)
            return
        command = usable(found, variant, seq_length, changes)
        if printed is not None:
            _print(command, printed)
        elif dry_run:
            _dry_run(command, as_json)
        else:
            _scaled(command, ranks or RANKS, steps or STEPS, as_json)


def _given(variant: str | None, seq_length: int | None, changes: Changes) -> list[str]:
    """The options that change an example, as typed."""
    values = {"variant": variant, "seq-length": seq_length, "provider": changes.provider}
    values |= {"nodes": changes.nodes, "per-node": changes.per_node}
    chosen = {"layout": changes.options.layout, **changes.options.chosen}
    values |= {name.replace("_", "-"): in_words(value) for name, value in chosen.items() if value is not None}
    return [*(f"--{name} {value}" for name, value in values.items() if value is not None), *changes.more]


def _show(example: Example | None, as_json: Path | None) -> None:
    """Show one example, or list all."""
    from cp_plugin.cli.examples import show
    from cp_plugin.cli.examples.config import examples

    every = list(examples()) if example is None else [example]
    found = [one.model_dump(mode="json") for one in every]
    if example is None:
        output.show(as_json, lambda: found, lambda: show.print_examples(new_console(), every))
    else:
        output.show(as_json, lambda: found[0], lambda: show.print_example(new_console(), example))


def _print(command: Command, what: Printed) -> None:
    from cp_plugin.cli.examples.scripts import rendered

    if what == Printed.flags:
        print("\n".join(shlex.join(line) for line in command.lines))
    else:
        print(rendered(command, what.value), end="")


def _dry_run(command: Command, as_json: Path | None) -> None:
    from cp_plugin.cli.examples import dry_run, show

    with new_console(stderr=True, quiet=output.only_json(as_json)).status(f"checking {command.devices} ranks"):
        run = dry_run.dry_run(command)
    output.show(as_json, lambda: show.as_json(run), lambda: show.print_dry_run(new_console(), run))
    if not run.ok:
        raise typer.Exit(1)


def _scaled(command: Command, ranks: int, steps: int, as_json: Path | None) -> None:
    from cp_plugin.cli.examples import scaled
    from cp_plugin.cli.examples.training import TrainingError

    of, quiet = scaled.scaled(command, ranks), output.only_json(as_json)
    if not quiet:
        scaled.print_changes(new_console(), of)
    try:
        run = scaled.run(of, steps, Path("out", "examples"), quiet=quiet)
    except TrainingError as error:
        typer.echo(f"FAIL: {error}", err=True)
        raise typer.Exit(1) from None
    output.show(as_json, lambda: scaled.as_json(run), lambda: scaled.print_run(new_console(), run))
    if run.problems:
        raise typer.Exit(1)
