"""Printing for all commands: tables, lines, and the final verdict."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Cells = tuple[str, ...]


def print_table(console: Console, title: str, columns: Cells, rows: Sequence[tuple[Cells, str]]) -> None:
    """Print rows of (cells, style): aligned text, or on a terminal a table that fits its width.

    A table omits empty columns; rows with a cell ``cannot: ...`` are listed below it by reason.
    """
    if console.is_terminal:
        refused: dict[str, dict[str, None]] = {}
        for cells, _ in rows:
            if (reason := _reason(cells)) is not None:
                refused.setdefault(reason, {})[cells[0]] = None
        _print_rows(console, title, columns, [row for row in rows if _reason(row[0]) is None])
        for reason, names in refused.items():
            print_lines(console, f"{', '.join(names)}: {reason}", style="dim")
        return
    lines = [columns, *(cells for cells, _ in rows)]
    widths = [max(len(cells[i]) for cells in lines) for i in range(len(columns))]
    aligned = ["  ".join(cell.ljust(w) for cell, w in zip(cells, widths, strict=True)).rstrip() for cells in lines]
    print_lines(console, title, *aligned)


def _reason(cells: Cells) -> str | None:
    return next((cell for cell in cells if cell.startswith("cannot: ")), None)


def _print_rows(console: Console, title: str, columns: Cells, rows: Sequence[tuple[Cells, str]]) -> None:
    shown = [i for i in range(len(columns)) if not rows or any(cells[i] for cells, _ in rows)]
    print_lines(console, title, style="italic")  # rich would wrap the table's own title at its width
    table = Table(*(columns[i] for i in shown), box=SIMPLE_HEAVY, collapse_padding=True)
    table.show_edge = table.pad_edge = False
    table.columns[0].no_wrap = True
    longest = max((len(cells[shown[-1]]) for cells, _ in rows), default=0)
    table.columns[-1].min_width = min(36, longest)  # notes are long
    for cells, style in rows:
        table.add_row(*(escape(cells[i]) for i in shown), style=style or None)
    console.print(table)


def print_lines(console: Console, *lines: str, style: str = "", whole: bool = False) -> None:
    """Print lines verbatim; on a terminal wrapped between words, unless ``whole``, for copying."""
    for line in lines:
        wrap = whole or not console.is_terminal
        console.print(line, style=style or None, markup=False, highlight=False, soft_wrap=wrap)


def print_verdict(ok: bool, text: str, console: Console | None = None) -> None:
    """Print the last line: PASS or FAIL, and why."""
    colour, word = ("green", "PASS") if ok else ("red", "FAIL")
    print_lines(console or Console(), f"{word}: {text}", style=f"bold {colour}", whole=True)
