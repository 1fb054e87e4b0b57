"""What all commands write in the same way: tables and lines within the width of the terminal, errors, and the verdict;
or JSON (``--json``); and files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cp_plugin.engine.common.text import either, wrap_for_terminal

Cells = tuple[str, ...]
REASONS = ("cannot: ", "DIFFERS: ", "FAIL: ")
"""Beginnings of a cell that says why a row has no result."""
WIDTH = 100
"""Columns where the output is not a terminal and COLUMNS is not set."""
_UNBROKEN = "\xa0"


def new_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Make the console of a command."""
    return Console(stderr=stderr, quiet=quiet, width=shutil.get_terminal_size((WIDTH, 24)).columns)


def print_table(console: Console, title: str, columns: Cells, rows: Sequence[tuple[Cells, str]]) -> None:
    """Print rows of (cells, style), wrapped between words to the console's width.

    Empty columns are left out; rows may be shorter than the columns. Rows with a cell ``cannot: ...``, or another of
    ``REASONS``, are listed below the table by reason.
    """
    shown: list[tuple[Cells, str]] = []
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for cells, style in rows:
        reason = next((cell for cell in cells if cell.startswith(REASONS)), None)
        if reason is None:
            shown.append(((*cells, *("" for _ in columns)), style))
        else:
            refused.setdefault((reason, style), {})[cells[0]] = None
    filled = [i for i in range(len(columns)) if any(cells[i] for cells, _ in shown)]
    if title:
        print_lines(console, title, style="italic")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for i in filled:
        table.add_column(columns[i], no_wrap=i == 0, overflow="fold")
    for cells, style in shown:
        table.add_row(*(Text(cells[i]) for i in filled), style=style)
    if shown:
        with console.capture() as printed:
            console.print(table)
        console.file.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))
    for (reason, style), names in refused.items():
        print_lines(console, f"{', '.join(names)}: {reason}", style=style)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width`` columns, unless a word is longer, indented like the first."""
    indent = " " * (len(text) - len(text.lstrip(" ")))
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]


def print_lines(console: Console, *lines: str, style: str = "") -> None:
    """Print lines verbatim, wrapped between words to the console's width."""
    for line in "\n".join(lines).split("\n") if lines else ():
        for part in _wrap(line, console.width):
            _print(console, part, style)


def print_flags(console: Console, title: str, flags: str, style: str = "bold green") -> None:
    """Print flags to paste into a shell: on several lines that end in a backslash, where one is too long."""
    lines = _wrap(re.sub(r" (?!--)", _UNBROKEN, flags), console.width - 6)
    _print(console, title, style)
    _print(console, "    " + " \\\n    ".join(lines).replace(_UNBROKEN, " "), style)


def print_verdict(ok: bool, text: str, console: Console | None = None) -> None:
    """Print the last line: PASS or FAIL, and why; never broken, since scripts read it."""
    colour, word = ("green", "PASS") if ok else ("red", "FAIL")
    _print(console or new_console(), f"{word}: {text}", f"bold {colour}")


def _print(console: Console, line: str, style: str) -> None:
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


PICTURES = (".svg", ".png", ".pdf")


def check_output(path: Path, kind: str, suffixes: Sequence[str], flag: str = "") -> None:
    """ValueError for an unwritable file or a wrong suffix; ``kind`` of file and ``flag``: for the message."""
    shown = f"{flag} {path}".strip()
    if path.suffix not in suffixes:
        better = path.with_suffix(suffixes[0]) if path.name else f"{kind}{suffixes[0]}"
        raise ValueError(f"{shown}: {kind}s are {either(suffixes)} files; write {better}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{shown} cannot be written: name a file in an existing folder that you can write to")


AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]


def error(text: str) -> None:
    """Print a user's error on stderr; in one line, unless that is a terminal."""
    typer.echo(wrap_for_terminal(f"error: {text}", sys.stderr), err=True)


def show(as_json: bool, content: Callable[[], Any], print_tables: Callable[[], None]) -> None:
    """Print a command's results: ``content`` as JSON, or tables."""
    if as_json:
        print(json.dumps(content(), indent=2), flush=True)
    else:
        print_tables()


def verdict(ok: bool, text: str, as_json: bool) -> None:
    """Print the verdict, unless only JSON is printed; exit with status 1 on failure."""
    if not as_json:
        print_verdict(ok, text)
    if not ok:
        raise typer.Exit(1)
