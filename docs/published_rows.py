"""Rows of ``docs/papers.md`` for the pages of examples.

They are copied from the generated page, so that no figure is computed twice and pages agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from evidence import data
from evidence.data import Method, Table
from evidence.report import COLUMNS

PAGE = Path(__file__).parent / "papers.md"
_SHOWN = ("method", "model", "devices", "tokens", "published", "predicted", "predicted / published", "")


def tables(paper: str, ids: Sequence[str]) -> Iterator[Table]:
    """A paper's tables with these ids, in the order of the paper; ValueError for an unknown id."""
    known = {table.id: table for table in data.paper(paper).tables}
    for one in ids:
        if one not in known:
            raise ValueError(f"published: {paper} has no table {one!r} (it has {', '.join(known)})")
    yield from (table for name, table in known.items() if name in ids)


def shown(paper: str, ids: Sequence[str], devices: set[int]) -> str:
    """The tables in Markdown, rows on that many devices, with the ratio of predicted to published."""
    parts = []
    for table in tables(paper, ids):
        rows = [row for row in rows_of(paper, table) if _devices(row) in devices]
        if rows:
            lines = [f"**{table.where}** [{table.figure}]", "", _line(_SHOWN), "|---" * len(_SHOWN) + "|"]
            parts.append(
                "\n".join(
                    lines + [_line([*(row[name] for name in COLUMNS[:6]), _ratio(row), row["note"]]) for row in rows]
                )
            )
    return "\n\n".join(parts)


def reasons(paper: str, ids: Sequence[str]) -> list[str]:
    """Reasons why figures are not predicted or contradict others."""
    found = []
    for table in tables(paper, ids):
        found += [f"{table.where}: {table.not_predicted}"] if table.not_predicted else []
        for series in table.series:
            of = data.paper(paper).methods.get(series.method, Method())
            found += [f"{series.method}: {text}" for text in (series.not_predicted, of.missing, of.incomplete) if text]
            found += [f"{series.method}: {text}" for text in (series.suspect, *series.suspects.values()) if text]
    return list(dict.fromkeys(found))


def ratios(paper: str, ids: Sequence[str], devices: set[int]) -> list[float]:
    """Predicted over published for rows on that many devices."""
    rows = [row for table in tables(paper, ids) for row in rows_of(paper, table) if _devices(row) in devices]
    return [float(found) for row in rows if (found := _ratio(row))]


def summary() -> str:
    """The page's summary over all papers: errors, method ratios, aims."""
    head = PAGE.read_text().partition("\n## ")[0].splitlines()
    table = next(line for line in head if line.startswith("|  | figures |"))
    rows = [line for line in head if line.startswith("| all") and line.count("|") == table.count("|")]
    worth = next(line for line in head if line.startswith("Ratio of two methods"))
    aims = [line for line in head if line.startswith(("- PASS ", "- FAIL "))]
    return "\n".join([table, "|---" * (table.count("|") - 1) + "|", *rows, "", worth, "", *aims])


class Compared(NamedTuple):
    """A method of a paper."""

    method: Method
    sharded: bool
    """Whether the devices share parameters (ZeRO of stage 3)."""


def methods(paper: str, ids: Sequence[str]) -> dict[str, Compared]:
    """The methods and the baselines of these tables, by the paper's names."""
    known, found = data.paper(paper).methods, {}
    for table in tables(paper, ids):
        for series in table.series:
            stack = data.paper(paper).clusters.get(series.cluster or table.cluster or "")
            zero = stack.training.get("zero") if stack else 0
            for name in (series.method, series.baseline or table.baseline or ""):
                if name in known:
                    found.setdefault(name, Compared(known[name], 3 in (known[name].zero, zero)))
    return found


def rows_of(paper: str, table: Table) -> list[dict[str, str]]:
    """The page's rows of a table, as column -> text; ValueError if the page is out of date."""
    heading = f"{table.where} ({table.figure})\n\n| {' | '.join(COLUMNS)} |\n"
    section = PAGE.read_text().partition(f"\n## {data.paper(paper).title}\n")[2]
    found = section.partition(heading)[2].partition("\n\n")[0].splitlines()[1:]
    if not found:
        raise ValueError(f"docs/papers.md has no table {table.where!r}: run python docs/generate.py")
    return [dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)) for line in found]


def _devices(row: dict[str, str]) -> int:
    return int(row["devices"].partition(" ")[0])


def _ratio(row: dict[str, str]) -> str:
    published, predicted = (row[name].replace(",", "") for name in ("published", "predicted"))
    return f"{float(predicted) / float(published):.2f}" if published and predicted else ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
