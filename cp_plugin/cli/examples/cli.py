"""The ``cp-plugin example`` command: published experiments as Megatron's flags and as a script."""

from __future__ import annotations

import shlex
from enum import StrEnum
from typing import Annotated

import typer

from cp_plugin.cli import flags
from cp_plugin.cli.terminal import new_console

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
    from cp_plugin.cli.examples import show
    from cp_plugin.cli.examples.config import examples, load, words

    with flags.errors_in_one_line():
        if printed is None:
            flags.refuse(
                {"--variant": variant, "--seq-length": seq_length}, "has no effect without --print sh or flags"
            )
            if name is None:
                show.print_examples(new_console(), examples())
            else:
                show.print_example(new_console(), load(name))
            return
        if name is None:
            raise ValueError("NAME is missing: cp-plugin example shows all examples")
        chosen = load(name).experiment(variant)
        if printed == Printed.flags:
            print("\n".join(shlex.join(line) for line in words(chosen.with_length(seq_length))))
        else:
            print(show.render(chosen, seq_length), end="")
