"""``python ci/papers [NAME ...] [--plots DIR]``: the same as ``cp-plugin plan --reproduce``.

``python ci/papers raw``: raw measurements, to which nothing was fitted, with their predictions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from evidence import measured, measured_report
from evidence.command import reproduce_and_show
from rich.console import Console

from cp_plugin.cli.flags import errors_in_one_line


def main(
    asked: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="a paper, or raw; default: all papers")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="folder for a picture of each paper")] = None,
) -> None:
    """Compare published figures with predictions."""
    with errors_in_one_line():
        if asked == ["raw"]:
            measured_report.show(Console(), measured.names(), plots)
            raise typer.Exit(0)
        ok = reproduce_and_show(asked or ["all"], Console(), plots)
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
