"""``python ci/papers [NAME ...] [--plots DIR]``: what ``cp-plugin plan --reproduce`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from evidence.command import reproduce_and_show
from rich.console import Console

from cp_plugin.cli.flags import errors_in_one_line


def main(
    asked: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="of a paper; default: all")] = None,
    plots: Annotated[Path | None, typer.Option(help="folder to draw a picture of each paper in")] = None,
) -> None:
    """Predict the published figures of papers, and compare."""
    with errors_in_one_line():
        ok = reproduce_and_show(asked or ["all"], Console(), plots)
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
