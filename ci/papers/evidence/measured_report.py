"""Report of raw measurements: on the terminal, as ``docs/measured.md`` and ``measured.json``, and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from cp_plugin.cli.terminal import Cells, print_lines, print_table
from evidence import measured
from evidence.measured import Errors
from evidence.measurements import Row
from evidence.plot import draw_strips

_SUMMARY = ("source", "predicted by", "short rows", "median (worst)", "long rows", "median (worst)")
SERIES = ("what", "series", "short rows", "median (worst)", "long rows", "median (worst)")
ROWS = ("what", "series", "size", "published", "predicted", "error")
_LARGE = 0.25
"""Larger errors are printed in red."""


def show(console: Console, names: Sequence[str], pictures: Path | None = None) -> None:
    """Print all rows, then the table of errors; draw pictures into a folder."""
    for name in names:
        of = measured.source(name)
        print_lines(console, "", f"{of.title}: {of.source}", style="bold")
        print_lines(console, *_notes(name))
        found = measured.rows(name)
        if found:
            print_table(console, "", ROWS, [(_cells(row), "red" * (abs(row.error) > _LARGE)) for row in found])
        if found and pictures is not None:
            pictures.mkdir(parents=True, exist_ok=True)
            draw(name, pictures / f"{name}.svg")
            print_lines(console, f"drew {pictures / f'{name}.svg'}")
    print_table(console, "\nErrors: predicted over published, minus one", _SUMMARY, [(r, "") for r in summary(names)])


def page() -> str:
    """The page in Markdown, without its head."""
    return "\n\n".join([_table(_SUMMARY, summary(measured.names())), *map(section, measured.names())])


def section(name: str) -> str:
    """The page's section on one source."""
    of = measured.source(name)
    parts = [f"## {of.title}", f"{of.source}."]
    if of.not_predicted:
        parts.append(f"Not predicted: {' '.join(of.not_predicted.split())}")
    else:
        parts.append(f"![{of.title}: predicted beside published](images/measured/{name}.svg)")
    return "\n\n".join(parts)


def record(name: str) -> dict[str, object]:
    """All rows of a source, errors by series, and notes."""
    found = measured.rows(name)
    return {
        "source": measured.source(name).source,
        "notes": list(_notes(name)),
        "errors": [list(row) for row in _by_series(found)],
        "rows": [list(_cells(row)) for row in found],
    }


def summary(names: Sequence[str]) -> list[Cells]:
    """Errors by source and part of the planner."""
    lines = []
    for name in names:
        found = measured.rows(name)
        for part in dict.fromkeys(row.part for row in found):
            own = [row for row in found if row.part == part]
            lines.append((measured.source(name).title, part, *_errors(own)))
    return lines


def draw(name: str, path: Path) -> None:
    """Draw a strip of predicted over published figures per series; ValueError without matplotlib."""
    strips = {}
    for panel in dict.fromkeys(row.panel for row in measured.rows(name)):
        for series, own in _series([row for row in measured.rows(name) if row.panel == panel]).items():
            sides = ([r.predicted / r.published for r in own if r.short is short] for short in (False, True))
            strips[", ".join(filter(None, (panel, series)))] = (next(sides), next(sides))
    draw_strips(strips, path, "predicted / published; hollow: short rows\nnumber: median of long rows")


def _by_series(found: list[Row]) -> Iterator[Cells]:
    panels = dict.fromkeys(row.panel for row in found)
    for panel in panels:
        for series, own in _series([row for row in found if row.panel == panel]).items():
            yield (panel, series, *_errors(own))


def _series(found: list[Row]) -> dict[str, list[Row]]:
    series: dict[str, list[Row]] = {}
    for row in found:
        series.setdefault(row.series, []).append(row)
    return series


def _errors(found: list[Row]) -> Cells:
    """Counts and errors of short and of long rows."""
    sides = (Errors.of([row for row in found if row.short is short]) for short in (True, False))
    return tuple(cell for side in sides for cell in (("", "") if side is None else (str(side.n), str(side))))


def _cells(row: Row) -> Cells:
    figures = (f"{value:.4g} {row.unit}" for value in (row.published, row.predicted))
    return (row.panel, row.series, row.what, *figures, f"{100 * row.error:+.0f} %")


def _notes(name: str) -> Iterator[str]:
    of = measured.source(name)
    if of.not_predicted:
        yield f"not predicted: {' '.join(of.not_predicted.split())}"
    if of.cluster:
        changed = "".join(f", {key} {value}" for key, value in of.override.items())
        library = f", attention by {of.library}" if of.library else ""
        yield f"profile: {of.cluster}{changed}{library}"
    if of.how:
        yield " ".join(of.how.split())
    yield from (f"left out: {text}" for text in of.left_out)


def _table(columns: Cells, lines: Sequence[Cells]) -> str:
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*rows, *(f"| {' | '.join(cells)} |" for cells in lines)])
