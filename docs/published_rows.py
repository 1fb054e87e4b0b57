"""Rows of ``docs/papers.json`` for the page of examples, and the summary of ``docs/papers.md``.

They are copied from what was generated, so that no figure is computed twice and pages agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import markdown_tables as markdown
from evidence import data
from evidence.data import Kind, Table
from evidence.report import COLUMNS

from cp_plugin.cli.examples import config
from cp_plugin.cli.examples.config import Example

PAGE = Path(__file__).parent / "papers.md"
_KINDS = get_args(Kind.__value__ if hasattr(Kind, "__value__") else Kind)


def tables(paper: str, ids: Sequence[str]) -> Iterator[Table]:
    """A paper's tables with these ids, in the order of the paper; ValueError for an unknown id."""
    known = {table.id: table for table in data.paper(paper).tables}
    for one in ids:
        if one not in known:
            raise ValueError(f"published: {paper} has no table {one!r} (it has {', '.join(known)})")
    yield from (table for name, table in known.items() if name in ids)


def ratios(paper: str, ids: Sequence[str], devices: set[int]) -> list[float]:
    """Predicted over published for rows on that many devices."""
    rows = [row for table in tables(paper, ids) for row in rows_of(paper, table) if _devices(row) in devices]
    return [float(found) for row in rows if (found := _ratio(row))]


def examples() -> str:
    """Return the table of the papers' experiments, each with the spread of its predictions."""
    columns = ("example", "GPUs", "models", "tokens", "method", "predicted / published: least, median, most")
    return markdown.table(columns, map(_example, config.examples()))


def _example(example: Example) -> list[str]:
    every = [example.experiment(name) for name in example.variants]
    ids = [one for experiment in every for one in experiment.published]
    found = sorted(ratios(example.config.paper, ids, {experiment.devices for experiment in every}))
    lengths = sorted(n for experiment in every for n in experiment.lengths)
    parallel = every[0].flags
    spread = (found[0], found[len(found) // 2], found[-1]) if found else ()
    return [
        f"[{example.name}](../examples/papers/{example.name}/config.yaml): {example.config.title}",
        f"{example.config.cluster.devices}",
        ", ".join(dict.fromkeys(experiment.planner_model for experiment in every)),
        f"{lengths[0]:,} to {lengths[-1]:,}",
        f"`{parallel.get('cp-linear-provider') or parallel.get('cp-provider')}`",
        ", ".join(f"{ratio:.2f}" for ratio in spread) or "none predicted",
    ]


def summary() -> str:
    """The page's summary over all papers: errors, method ratios, aims."""
    head = PAGE.read_text().partition("\n## ")[0].splitlines()
    table = next(line for line in head if line.startswith("|  | figures |"))
    rows = [line for line in head if line.startswith("| all") and line.count("|") == table.count("|")]
    worth = next(line for line in head if line.startswith("Ratio of two methods"))
    aims = [line for line in head if line.startswith(("- PASS ", "- FAIL "))]
    return "\n".join([table, "|---" * (table.count("|") - 1) + "|", *rows, "", worth, "", *aims])


def rows_of(paper: str, table: Table) -> list[dict[str, str]]:
    """The record's rows of a table, as column -> text; ValueError if the record is out of date."""
    found = _record()[data.paper(paper).title]["rows"].get(f"{table.where} ({table.figure})")
    if not found:
        raise ValueError(f"docs/papers.json has no table {table.where!r}: run python docs/generate.py")
    return [dict(zip(COLUMNS, cells, strict=True)) for cells in found]


def reproduced() -> str:
    """For each paper: its rows, the error of their predictions, and the order of its methods; from the page."""
    head = PAGE.read_text().partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in head.splitlines() if line.startswith("|")]
    lines = []
    for name in data.NAMES:
        title = data.paper(name).title
        own = [row for row in cells if row[0] == title]
        errors = ", ".join(f"{row[1]} {row[3]} ({row[2]})" for row in own if row[1] in _KINDS)
        order = next(row[1] for row in own if row[1] not in _KINDS)
        lines.append((title, errors, order or "-"))
    return markdown.table(("paper", "error of predictions (rows)", "order"), lines)


@cache
def _record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PAGE.parent / "papers.json").read_text())
    return found


def _devices(row: dict[str, str]) -> int:
    return int(row["devices"].partition(" ")[0])


def _ratio(row: dict[str, str]) -> str:
    published, predicted = (row[name].replace(",", "") for name in ("published", "predicted"))
    return f"{float(predicted) / float(published):.2f}" if published and predicted else ""
