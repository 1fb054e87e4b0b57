"""``cp-plugin example``: the published experiments, as commands for this machine and for a cluster."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cp_plugin.cli import flags
from cp_plugin.core.options import Options

if TYPE_CHECKING:
    from cp_plugin.cli.examples.command import Changes, Command
    from cp_plugin.cli.examples.config import Example


class Printed(StrEnum):
    """What to print."""

    sh = "sh"
    sbatch = "sbatch"
    flags = "flags"


@flags.provider_options(without=("backend",))
def example(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="an example, or a folder with a config.yaml; default: list")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="a variant of the example; default: its base")] = None,
    seq_length: Annotated[int | None, typer.Option(help="tokens of a sequence; default: the example's first")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check the whole command here, without a GPU")] = False,
    scaled: Annotated[
        int | None, typer.Option(metavar="RANKS", min=1, help="train with narrow layers on CPU ranks, against CP 1")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="with --scaled: iterations")] = 4,
    printed: Annotated[
        Printed | None, typer.Option("--print", help="the script for a node, for Slurm, or flags")
    ] = None,
    provider: Annotated[str | None, typer.Option(help="another method; upstream: Megatron's own")] = None,
    *,
    options: Options,
    nodes: Annotated[int | None, typer.Option(min=1, help="nodes; default: as published")] = None,
    per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; default: as published")] = None,
    as_json: flags.AsJson = False,
) -> None:
    """Show, check, scale down or print a published experiment. Behind ``--``: more flags for Megatron."""
    from cp_plugin.cli.examples.command import Changes
    from cp_plugin.cli.examples.config import load

    with flags.errors_in_one_line():
        ways = [dry_run, scaled is not None, printed is not None]
        changes = Changes(provider=provider, options=options, nodes=nodes, per_node=per_node, more=tuple(context.args))
        if sum(ways) > 1:
            raise ValueError("--dry-run, --scaled and --print: one of them at a time")
        if not any(ways) and (changes != Changes() or variant is not None or seq_length is not None):
            raise ValueError("what for? Add --dry-run, --scaled RANKS or --print sh")
        if name is None:
            if any(ways):
                raise ValueError("which example? cp-plugin example lists them")
            _list(as_json)
            return
        found = load(name)
        if printed is not None:
            _print(_command(found, variant, seq_length, changes), printed)
        elif dry_run:
            _dry_run(_command(found, variant, seq_length, changes), as_json)
        elif scaled is not None:
            _scaled(_command(found, variant, seq_length, changes), scaled, steps, as_json)
        else:
            _describe(found, as_json)


def _list(as_json: bool) -> None:
    from cp_plugin.cli.examples.config import examples
    from cp_plugin.cli.examples.show import print_examples

    if as_json:
        print(json.dumps([one.model_dump(mode="json") for one in examples()], indent=2))
    else:
        print_examples(Console(), examples())


def _describe(found: Example, as_json: bool) -> None:
    from cp_plugin.cli.examples.show import print_example

    if as_json:
        print(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        print_example(Console(), found)


def _command(found: Example, variant: str | None, seq_length: int | None, changes: Changes) -> Command:
    """With what fits, where a number of GPUs does not."""
    from cp_plugin.cli.examples.sizes import usable

    return usable(found, variant, seq_length, changes)


def _print(command: Command, what: Printed) -> None:
    import shlex

    from cp_plugin.cli.examples.scripts import rendered

    if what == Printed.flags:
        print("\n".join(shlex.join(line) for lines in command.lines.values() for line in lines if line))
    else:
        print(rendered(command, what.value), end="")


def _dry_run(command: Command, as_json: bool) -> None:
    from cp_plugin.cli.examples import show
    from cp_plugin.cli.examples.dry_run import dry_run

    with Console(stderr=True, quiet=as_json).status(f"checking {command.devices} ranks"):
        run = dry_run(command)
    if as_json:
        print(json.dumps(show.as_json(run), indent=2))
    else:
        show.print_dry_run(Console(), run)
    if not run.ok:
        raise typer.Exit(1)


def _scaled(command: Command, ranks: int, steps: int, as_json: bool) -> None:
    from cp_plugin.cli.examples.scaled_run import run_and_show
    from cp_plugin.cli.examples.training import TrainingError

    try:
        same = run_and_show(Console(), command, ranks, steps, as_json=as_json)
    except TrainingError as error:
        typer.echo(f"FAIL: {error}", err=True)
        raise typer.Exit(1) from None
    if not same:
        raise typer.Exit(1)
