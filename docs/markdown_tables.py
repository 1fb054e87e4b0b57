"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(titles: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A line for the titles, and one for each row; an empty cell is one blank wide."""
    return "\n".join([_line(titles), "|---" * len(titles) + "|", *map(_line, rows)])


def _line(cells: Sequence[object]) -> str:
    return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)
