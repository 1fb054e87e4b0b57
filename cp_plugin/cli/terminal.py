"""Printing for all commands, within the width of the terminal: tables, lines, flags to paste, and the final verdict."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console

Cells = tuple[str, ...]
REASONS = ("cannot: ", "DIFFERS: ", "FAIL: ")
"""Beginnings of a cell that says why a row has no result."""
WIDTH = 100
"""Columns where the output is not a terminal and COLUMNS is not set."""
_GAP = 2
_WORDS = re.compile(r"(?<!\d) +|(?<=\d) +(?=[\d(])")
"""Between words, but not between a number and its unit."""
_PARTS = re.compile(r"(?<=,) +")
"""Between the parts of a list."""


def new_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """The console of a command."""
    return Console(stderr=stderr, quiet=quiet, width=shutil.get_terminal_size((WIDTH, 24)).columns)


def print_table(console: Console, title: str, columns: Cells, rows: Sequence[tuple[Cells, str]]) -> None:
    """Print rows of (cells, style), wrapped between words to the console's width.

    Empty columns are left out. Rows with a cell ``cannot: ...``, or another of ``REASONS``, are listed below the table
    by reason.
    """
    shown = [(cells, style) for cells, style in rows if _reason(cells) is None]
    kept = [i for i in range(len(columns)) if not shown or any(cells[i] for cells, _ in shown)]
    lines = [([cells[i] for i in kept], style) for cells, style in [(columns, "bold"), *shown]]
    if title:
        print_lines(console, title, style="italic")
    whole = [cells for cells, _ in lines]
    breaks, widths = _PARTS, _widths(whole, console.width, _PARTS)
    if not widths:
        breaks, widths = _WORDS, _widths(whole, console.width, _WORDS)
    for row, style in lines if shown else []:
        for line in _aligned(row, widths, breaks) if widths else _stacked(whole[0], row, console.width):
            _print(console, line, style)
    refused: dict[tuple[str, str], dict[str, None]] = {}
    for cells, style in rows:
        if (reason := _reason(cells)) is not None:
            refused.setdefault((reason, style), {})[cells[0]] = None
    for (reason, style), names in refused.items():
        print_lines(console, f"{', '.join(names)}: {reason}", style=style)


def _reason(cells: Cells) -> str | None:
    return next((cell for cell in cells if cell.startswith(REASONS)), None)


def _widths(lines: Sequence[Sequence[str]], width: int, breaks: re.Pattern[str]) -> list[int]:
    """The width of each column; the widest give way first. Empty if what stands between two breaks does not fit."""
    cells = list(zip(*lines, strict=True))
    found = [max(map(len, column)) for column in cells]
    least = [found[0], *(max(len(word) for cell in column for word in breaks.split(cell)) for column in cells[1:])]
    while sum(found) + _GAP * (len(found) - 1) > width:
        wide = [i for i in range(len(found)) if found[i] > least[i]]
        if not wide:
            return []
        found[max(wide, key=lambda i: found[i])] -= 1
    return found


def _aligned(cells: Sequence[str], widths: Sequence[int], breaks: re.Pattern[str]) -> Iterator[str]:
    """The lines of a row."""
    wrapped = [_wrapped(cell, width, breaks) for cell, width in zip(cells, widths, strict=True)]
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


def _wrapped(text: str, width: int, breaks: re.Pattern[str] = _WORDS) -> list[str]:
    """Lines of at most ``width`` columns, unless a word is longer, indented like the first."""
    if len(text) <= width:
        return [text]
    indent = " " * (len(text) - len(text.lstrip(" ")))
    found = [""]
    for word in breaks.split(text.strip(" ")):
        line = f"{found[-1]} {word}" if found[-1] else indent + word
        if len(line) <= width or not found[-1]:
            found[-1] = line
        else:
            found.append(indent + word)
    return found


def print_lines(console: Console, *lines: str, style: str = "") -> None:
    """Print lines verbatim, wrapped between words to the console's width."""
    for text in lines:
        for line in text.split("\n"):
            for part in _wrapped(line, console.width):
                _print(console, part, style)


def print_flags(console: Console, title: str, flags: str, style: str = "bold green") -> None:
    """Print flags to paste into a shell: on several lines that end in a backslash, where one is too long."""
    _print(console, title, style)
    lines = [""]
    for flag in re.split(r" (?=--)", flags):
        if lines[-1] and len(f"{lines[-1]} {flag}") > console.width - 6:
            lines.append("")
        lines[-1] = f"{lines[-1]} {flag}".strip()
    for i, line in enumerate(lines):
        _print(console, f"    {line}" + " \\" * (i + 1 < len(lines)), style)


def print_verdict(ok: bool, text: str, console: Console | None = None) -> None:
    """Print the last line: PASS or FAIL, and why; never broken, since scripts read it."""
    colour, word = ("green", "PASS") if ok else ("red", "FAIL")
    _print(console or new_console(), f"{word}: {text}", f"bold {colour}")


def _print(console: Console, line: str, style: str) -> None:
    console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)
