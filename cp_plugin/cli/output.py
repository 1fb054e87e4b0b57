"""What all commands write in the same way: errors, JSON (``--json [FILE]``) instead of tables or besides, and files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cp_plugin.cli.terminal import print_verdict
from cp_plugin.common.text import either, within_terminal

PICTURES = (".svg", ".png", ".pdf")
STDOUT = "-"
"""The value of ``--json`` without a file."""


def check_output(path: Path, kind: str = "file", suffixes: Sequence[str] = (), flag: str = "") -> None:
    """ValueError for an unwritable file or a wrong suffix; ``kind`` of file and ``flag``: for the message."""
    if not path.name:
        example = f"{kind}{suffixes[0] if suffixes else ''}"
        raise ValueError(f"{flag or path}: name the {kind} to write, such as {example}")
    if suffixes and path.suffix not in suffixes:
        listed = either(suffixes)
        shown = f"{flag} {path}".strip()
        raise ValueError(f"{shown}: {kind}s are {listed} files; write {path.with_suffix(suffixes[0])}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        shown = f"{flag} {path}".strip()
        raise ValueError(f"{shown} cannot be written: name a file in an existing folder that you can write to")


def json_file(text: str) -> Path:
    """A file that can be written by the reporting process, or ``STDOUT``; BadParameter for another."""
    from cp_plugin.testing.ranks import is_first  # it imports torch

    path = Path(text)
    if text != STDOUT and is_first():
        try:
            check_output(path, "file", (".json",), "--json")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return path


AsJson = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="[FILE]", parser=json_file, help="print JSON and nothing else, or write it to FILE too"
    ),
]


def only_json(to: Path | None) -> bool:
    """Whether nothing but JSON is printed."""
    return to is not None and str(to) == STDOUT


def error(text: str) -> None:
    """Print a user's error on stderr; in one line, unless that is a terminal."""
    typer.echo(within_terminal(f"error: {text}", sys.stderr), err=True)


def show(to: Path | None, as_json: Callable[[], Any], print_tables: Callable[[], None]) -> None:
    """Print the tables, unless only JSON was asked for; print or write the JSON, if it was."""
    if not only_json(to):
        print_tables()
    if to is None:
        return
    text = json.dumps(as_json(), indent=2)
    if only_json(to):
        print(text, flush=True)
    else:
        to.write_text(f"{text}\n")
        typer.echo(f"wrote {to}")


def verdict(ok: bool, text: str, as_json: Path | None) -> None:
    """Print the verdict, unless only JSON is printed; exit with status 1 on failure."""
    if not only_json(as_json):
        print_verdict(ok, text)
    if not ok:
        raise typer.Exit(1)
