"""Printing for all commands, within the width of the terminal: tables, lines, flags to paste, and the final verdict."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console

Cells = tuple[str, ...]
REASONS = ("cannot: ", "DIFFERS: ", "FAIL: ")
"""Beginnings of a cell that says why a row has no result."""
WIDTH = 100
"""Columns where the output is not a terminal and COLUMNS is not set."""
_GAP = 2
_UNITS = re.compile(r"(?<=\d) +(?=[^ \d(])")
"""Between a number and its unit."""
_WITHIN_PARTS = re.compile(r"(?<!,) +(?! )")
"""Within the parts of a list."""
_WITHIN_FLAGS = re.compile(r" +(?! |--)")
_UNBROKEN = "\xa0"


def new_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The console of a command."""
    return Console(stderr=stderr, quiet=quiet, width=shutil.get_terminal_size((WIDTH, 24)).columns)


def print_table(console: Console, title: str, columns: Cells, rows: Sequence[tuple[Cells, str]]) -> None:
    """Print rows of (cells, style), wrapped between words to the console's width.

    Empty columns are left out; rows may be shorter than the columns. Rows with a cell ``cannot: ...``, or another of
    ``REASONS``, are listed below the table by reason.
    """
    missing = ("",) * len(columns)
    shown = [((*cells, *missing), style) for cells, style in rows if _reason(cells) is None]
    filled = [i for i in range(len(columns)) if not shown or any(cells[i] for cells, _ in shown)]
    lines = [([cells[i] for i in filled], style) for cells, style in [(columns, "bold"), *shown]]
    if title:
        print_lines(console, title, style="italic")
    whole = [cells for cells, _ in lines]
    kept, widths = _WITHIN_PARTS, _widths(whole, console.width, _WITHIN_PARTS)
    if not widths:
        kept, widths = _UNITS, _widths(whole, console.width, _UNITS)
    for row, style in lines if shown else []:
        for line in _aligned(row, widths, kept) if widths else _stacked(whole[0], row, console.width):
            _print(console, line, style)
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for cells, style in rows:
        if (reason := _reason(cells)) is not None:
            refused.setdefault((reason, style), {})[cells[0]] = None
    for (reason, style), names in refused.items():
        print_lines(console, f"{', '.join(names)}: {reason}", style=style)


def _reason(cells: Cells) -> str | None:
    return next((cell for cell in cells if cell.startswith(REASONS)), None)


def _widths(lines: Sequence[Sequence[str]], width: int, kept: re.Pattern[str]) -> list[int]:
    """The width of each column; the widest give way first. Empty if what is kept together does not fit."""
    cells = list(zip(*lines, strict=True))
    found = [max(map(len, column)) for column in cells]
    words = [[word for cell in column for word in kept.sub(_UNBROKEN, cell).split(" ")] for column in cells[1:]]
    least = [found[0], *(max(map(len, column)) for column in words)]
    while sum(found) + _GAP * (len(found) - 1) > width:
        wide = [i for i in range(len(found)) if found[i] > least[i]]
        if not wide:
            return []
        found[max(wide, key=lambda i: found[i])] -= 1
    return found


def _aligned(cells: Sequence[str], widths: Sequence[int], kept: re.Pattern[str]) -> Iterator[str]:
    """The lines of a row."""
    wrapped = [_wrapped(cell, width, kept) for cell, width in zip(cells, widths, strict=True)]
    for line in zip_longest(*wrapped, fillvalue=""):
        yield (" " * _GAP).join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _stacked(columns: Sequence[str], cells: Sequence[str], width: int) -> Iterator[str]:
    """A row below its first cell, a line for each other one that is not empty; nothing for the header."""
    if columns is cells:
        return
    yield from _wrapped(cells[0], width)
    for name, cell in zip(columns[1:], cells[1:], strict=True):
        if cell:
            yield from _wrapped(f"  {name}: {cell}", width)


def _wrapped(text: str, width: int, kept: re.Pattern[str] = _UNITS) -> list[str]:
    """Lines of at most ``width`` columns, unless a word is longer, indented like the first; spaces in ``kept`` stay."""
    if len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip(" ")))
    indents = {"initial_indent": indent, "subsequent_indent": indent}
    whole = kept.sub(_UNBROKEN, text.strip(" "))
    lines = textwrap.wrap(whole, width, **indents, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_UNBROKEN, " ") for line in lines]


def print_lines(console: Console, *lines: str, style: str = "") -> None:
    """Print lines verbatim, wrapped between words to the console's width."""
    for text in lines:
        for line in text.split("\n"):
            for part in _wrapped(line, console.width):
                _print(console, part, style)


def print_flags(console: Console, title: str, flags: str, style: str = "bold green") -> None:
    """Print flags to paste into a shell: on several lines that end in a backslash, where one is too long."""
    _print(console, title, style)
    _print(console, "    " + " \\\n    ".join(_wrapped(flags, console.width - 6, _WITHIN_FLAGS)), style)


def print_verdict(ok: bool, text: str, console: Console | None = None) -> None:
    """Print the last line: PASS or FAIL, and why; never broken, since scripts read it."""
    colour, word = ("green", "PASS") if ok else ("red", "FAIL")
    _print(console or new_console(), f"{word}: {text}", f"bold {colour}")


def _print(console: Console, line: str, style: str) -> None:
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)
