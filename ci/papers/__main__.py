"""``python ci/papers [NAME ...] [--plots DIR]``: what ``cp-plugin plan --reproduce`` does.

``python ci/papers raw``: raw measurements that nothing was fitted to, beside what is predicted for them.
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
        list[str] | None, typer.Argument(metavar="NAME", help="of a paper, or raw; default: papers")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="folder to draw a picture of each paper in")] = None,
) -> None:
    """Predict published figures, and compare."""
    with errors_in_one_line():
        if asked == ["raw"]:
            measured_report.show(Console(), measured.names(), plots)
            raise typer.Exit(0)
        ok = reproduce_and_show(asked or ["all"], Console(), plots)
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
