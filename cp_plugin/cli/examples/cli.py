"""The ``cp-plugin example`` command: published experiments as Megatron's flags and as a script."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cp_plugin.cli import flags, output, shell
from cp_plugin.cli.terminal import new_console
from cp_plugin.common.text import in_words
from cp_plugin.core.options import Options

if TYPE_CHECKING:
    from cp_plugin.cli.examples.command import Changes, Command
    from cp_plugin.cli.examples.config import Example


class Printed(StrEnum):
    sh = "sh"
    flags = "flags"


@shell.context(allow_extra_args=True)
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
    printed: Annotated[
        Printed | None, typer.Option("--print", help="print the script for each node (sh), or only the flags")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(metavar="NAME", help="another method; upstream: stock Megatron")
    ] = None,
    *,
    options: Options,
    as_json: output.AsJson = None,
) -> None:
    """Show or print a published experiment; Megatron flags after ``--`` override its own."""
    from cp_plugin.cli.examples.command import Changes, command
    from cp_plugin.cli.examples.config import load

    with flags.errors_in_one_line(translated=not context.args):
        changes = Changes(provider=provider, options=options, more=tuple(context.args))
        if listed and (name is not None or printed is not None):
            raise ValueError("--list shows all examples: leave the other arguments out")
        if printed is None and (given := _given(variant, seq_length, changes)):
            effect = "have no effect" if len(given) > 1 else "has no effect"
            raise ValueError(f"{', '.join(given)} {effect} alone: add --print sh or --print flags")
        if printed is not None and as_json is not None:
            raise ValueError(f"--json has no effect with --print {printed}: leave one of the two out")
        if printed is not None and name is None:
            raise ValueError("NAME is missing: cp-plugin example --list shows all examples")
        found = load(name) if name is not None else None
        if found is None or printed is None:
            _show(found, as_json)
        else:
            _print(command(found, variant, seq_length, changes), printed)


def _given(variant: str | None, seq_length: int | None, changes: Changes) -> list[str]:
    """The options that change an example, as typed."""
    values = {"variant": variant, "seq-length": seq_length, "provider": changes.provider}
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
        print(rendered(command), end="")
