"""The ``cp-plugin`` command."""

from __future__ import annotations

from typing import Annotated, ClassVar

import typer

from cp_plugin import __version__
from cp_plugin.tools import shell


class Program(shell.Group):
    """``cp-plugin``."""

    modules: ClassVar = {
        "doctor": "doctor",
        "draw": "draw.cli",
        "traffic": "traffic",
        "verify": "verify",
        "bench": "bench.cli",
        "calibrate": "calibrate",
        "dataset": "dataset",
        "example": "examples.cli",
        "plan": "plan",
        "generate": "generate",
    }


app = shell.new_app(cls=Program, help="Context parallelism for Megatron-LM, NeMo, transformers and plain PyTorch.")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{shell.PROGRAM} {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


if __name__ == "__main__":
    app()
