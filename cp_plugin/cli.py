"""The ``cp-plugin`` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Context parallelism for Megatron-LM, NeMo and torch."
)


@app.callback()
def main() -> None:
    """Context parallelism for Megatron-LM, NeMo and torch."""


@app.command()
def doctor() -> None:
    """Show what is installed, which attention kernels work here, and how to get what is missing."""
    from cp_plugin.doctor import kernel_checks, library_checks

    console = Console()
    libraries, kernels = library_checks(), kernel_checks()
    table = Table("library", "found", "what to do", title="Libraries")
    for check in libraries:
        table.add_row(check.name, escape(check.found), escape(check.advice), style=None if check.ok else "red")
    console.print(table)
    table = Table("kernel", "device", "dtype", "one tile", title="Attention kernels (--cp-backend)")
    for kernel in kernels:
        table.add_row(
            kernel.backend, kernel.device, kernel.dtype, escape(kernel.result), style=None if kernel.ok else "red"
        )
    console.print(table)
    broken = [c.name for c in libraries if not c.ok] + [k.backend for k in kernels if not k.ok]
    if broken:
        console.print(f"FAIL: {', '.join(broken)}", style="bold red")
        raise typer.Exit(1)
    console.print("PASS: everything that is needed works here", style="bold green")


@app.command()
def draw(
    path: Annotated[Path, typer.Argument(help="picture to write; PNG, SVG or PDF by its suffix")],
    ranks: Annotated[int, typer.Option(min=1, max=8, help="context-parallel ranks")] = 4,
) -> None:
    """Draw the token layouts: who holds what, who computes what, and how long a causal ring takes."""
    from cp_plugin.draw import draw_layouts

    draw_layouts(path, ranks, tokens=8 * ranks)
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    app()
