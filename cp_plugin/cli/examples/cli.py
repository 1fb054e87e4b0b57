"""The ``cp-plugin example`` command: published experiments as Megatron's flags and as a script."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import Annotated

import typer

from cp_plugin.cli import flags, output
from cp_plugin.cli.terminal import new_console

Printed = StrEnum("Printed", ["sh", "flags"])


def example(
    name: Annotated[str | None, typer.Argument(help="an example; default: list all")] = None,
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
    as_json: output.AsJson = None,
) -> None:
    """Show or print a published experiment."""
    from cp_plugin.cli.examples import show
    from cp_plugin.cli.examples.config import examples, load, words

    with flags.errors_in_one_line():
        if listed and (name is not None or printed is not None):
            raise ValueError("--list shows all examples: leave the other arguments out")
        changes = {"--variant": variant, "--seq-length": seq_length}
        if printed is None and (given := [f"{flag} {value}" for flag, value in changes.items() if value is not None]):
            effect = "have no effect" if len(given) > 1 else "has no effect"
            raise ValueError(f"{', '.join(given)} {effect} alone: add --print sh or --print flags")
        if printed is not None and as_json is not None:
            raise ValueError(f"--json has no effect with --print {printed}: leave one of the two out")
        if name is None:
            if printed is not None:
                raise ValueError("NAME is missing: cp-plugin example --list shows all examples")
            every = list(examples())
            found = [one.model_dump(mode="json") for one in every]
            output.show(as_json, lambda: found, lambda: show.print_examples(new_console(), every))
            return
        one = load(name)
        if printed is None:
            output.show(as_json, lambda: one.model_dump(mode="json"), lambda: show.print_example(new_console(), one))
        elif printed == Printed.flags:
            print("\n".join(shlex.join(line) for line in words(one.experiment(variant).with_length(seq_length))))
        else:
            print(show.render(one.experiment(variant), seq_length), end="")
