"""Report of a reproduction: on the terminal, as ``docs/papers.md``, and row by row in ``docs/papers.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from cp_plugin.cli.tables import Cells, print_table
from cp_plugin.cli.terminal import print_lines
from evidence import data
from evidence.data import Kind, Row
from evidence.reproduce import TIMES, Reproduction
from evidence.score import (
    PLANNER,
    WAYS,
    Predicted,
    Share,
    Way,
    counted,
    in_order,
    median_error,
    over_baseline,
    pairs,
    ratio_error,
    stands_for,
)
from evidence.stacks import PARAMETERS, SHARED

COLUMNS = ("method", "model", "devices", "tokens", "published", "predicted", "error", *WAYS[1:], "note")
"""``predicted`` is with zero fit; of the other ways only the error is shown."""


def show(found: Reproduction, console: Console) -> None:
    """Print the papers' tables, fits and errors, and the summary as the last line."""
    for name in found.names:
        part = found.of(name)
        print_lines(console, f"\n{data.paper(name).title}: {data.paper(name).source}", style="bold")
        for table in data.paper(name).tables:
            lines = [(cells(p), style(p)) for p in part.predicted if p.row.table == table.id]
            print_table(console, f"\n{table.where} [{table.figure}]", COLUMNS, lines)
        for text in _notes(part):
            print_lines(console, text)
    for title, (head, *rows) in (("median errors", _errors(found)), ("methods against each other", _methods(found))):
        print_table(console, f"\n{title}", head, [(row, "") for row in rows])
    console.print()
    for text in (worth(found), *map(str, found.aims), str(found)):
        print_lines(console, text)


def cells(p: Predicted) -> Cells:
    """A row of a table."""
    row = p.row
    of = row.work.removeprefix("attention ") if row.work.startswith("attention ") else ""
    return (
        " / ".join(filter(None, (row.method, row.baseline))) + (f", {of}" if of else ""),
        row.model,
        str(row.devices) + (f" (tensor {row.tensor})" if row.tensor > 1 else ""),
        f"{row.length:,}" if row.length else "",
        _figure(row, row.published),
        _figure(row, p.values.get("zero fit")),
        _signed(p.error("zero fit")),
        *(_signed(p.error(way)) for way in WAYS[1:]),
        note(p),
    )


def note(p: Predicted) -> str:
    """Why a row does not count, or is uncertain."""
    row = p.row
    if row.published is None:
        return "out of memory" if row.mark == "OOM" else row.mark
    if row.excuse:
        return "not predicted"
    if row.mark:
        return row.mark.partition(":")[0]
    return "partly assumed" if data.method(row, row.method).incomplete else ""


def style(p: Predicted) -> str:
    if not p.row.counts:
        return "dim"
    return "red" if abs(p.error("zero fit") or 0.0) > 0.25 else ""


def page(found: Reproduction) -> str:
    """The page in Markdown, without its head."""
    aims = "\n".join(f"- {aim}" for aim in found.aims)
    methods = (_methods(found), _by_provider(found), _shared(found))
    tables = (_markdown(_errors(found)), worth(found), *map(_markdown, methods))
    return "\n\n".join([aims, *tables, *(section(found, name) for name in found.names)])


def section(found: Reproduction, name: str) -> str:
    """The page's section on one paper."""
    paper = data.paper(name)
    return "\n\n".join(
        [
            f"## {paper.title}",
            f"{paper.source}.",
            f"![{paper.title}: predicted beside published](images/papers/{name}.svg)",
        ]
    )


def record(found: Reproduction, name: str) -> dict[str, object]:
    """All rows of a paper with their predictions, errors by table, and what is known and assumed of its machines."""
    part = found.of(name)
    rows = {
        f"{table.where} ({table.figure})": [list(cells(p)) for p in part.predicted if p.row.table == table.id]
        for table in data.paper(name).tables
    }
    return {"notes": list(_notes(part)), "errors": [list(row) for row in _by_table(part)], "rows": rows}


def worth(found: Reproduction) -> str:
    """Error of predicted ratios of methods, in words."""
    errors = "; ".join(f"{_percent(found.worth(way))} with {way}" for way in PLANNER)
    n = len(pairs(found.times, "zero fit"))
    return f"Ratio of two methods' times in the same setting ({n} pairs): median error {errors}."


def _errors(found: Reproduction) -> list[Cells]:
    """Median errors by paper and kind; in brackets the number of rows, where not all."""
    rows: list[Cells] = [("", "figures", "rows", *WAYS)]
    for part in found.parts:
        rows += [_error_row(part, (k,)) for k in (*TIMES, "memory") if counted(part.kinds(k), "zero fit")]
    if len(found.names) > 1:
        rows.append(_error_row(found, TIMES))
        rows.append(
            ("all, each paper weighing the same", "times", "", *map(_percent, map(found.papers_alike, PLANNER)), "", "")
        )
    return rows


def _error_row(part: Reproduction, kinds: Sequence[Kind]) -> Cells:
    own = part.kinds(*kinds)
    n = len(counted(own, "zero fit"))
    return (part.title, "times" if len(kinds) > 1 else kinds[0], str(n), *(_median(own, way, n) for way in WAYS))


def _median(predicted: Sequence[Predicted], way: Way, of: int) -> str:
    found, n = median_error(predicted, way), len(counted(predicted, way))
    return "" if found is None else _percent(found) + (f" ({n})" if n < of else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _methods(found: Reproduction) -> list[Cells]:
    """Order and ratios of methods."""
    out, order, ratio = "a paper left out", "pairs in the published order", "ratios off by"
    sides = "speedups on the published side of 1"
    head = (order, f"{order}, {out}", ratio, f"{ratio}, {out}", sides, f"the same, {out}")
    rows: list[Cells] = [("", *head)]
    ways: tuple[Way, ...] = ("zero fit", "a paper left out")
    for part in found.parts:
        orders = (in_order(part.times, way) for way in ways)
        ratios = (ratio_error(part.times, way) for way in ways)
        speedups = (over_baseline(part.times, way) for way in ways)
        shown = (*map(_share, orders), *("" if x is None else _percent(x) for x in ratios), *map(_share, speedups))
        rows.append((part.title, *shown))
    return rows


def _by_provider(found: Reproduction) -> list[Cells]:
    """Errors of ratios, by the provider of ours that is in them."""
    ways: tuple[Way, ...] = ("zero fit", "a paper left out")
    rows: list[Cells] = [("ratios with", "pairs", "off by", f"off by, {ways[1]}")]
    every = pairs(found.times, ways[0])
    for name in sorted({stands_for(p.row) for pair in every for p in pair} - {""}):
        own = sum(any(stands_for(p.row) == name for p in pair) for pair in every)
        errors = (ratio_error(found.times, way, name) for way in ways)
        rows.append((f"`{name}`", str(own), *("" if x is None else _percent(x) for x in errors)))
    return rows


def _share(share: Share) -> str:
    return str(share) if share.all else ""


def _shared(found: Reproduction) -> list[Cells]:
    """Shared parameters as fitted to all other papers."""
    titles = (data.paper(name).title for name in found.names)
    rows: list[Cells] = [("shared parameter, relative to its assumption; without", *titles, "plausible")]
    for i, one in enumerate(SHARED):
        low, high = one.plausible
        values = (f"{found.shared[name][i]:.2f}" for name in found.shared)
        rows.append((one.label, *values, f"{low} to {high}: {one.why}"))
    return rows


def _by_table(part: Reproduction) -> list[Cells]:
    rows: list[Cells] = [("table", "figure", "rows", *WAYS, "largest, zero fit", "in order, zero fit")]
    for table in data.paper(part.names[0]).tables:
        own = [p for p in part.predicted if p.row.table == table.id]
        errors = [p.error("zero fit") or 0.0 for p in counted(own, "zero fit")]
        if errors:
            order = in_order(own, "zero fit")
            medians = (_median(own, way, len(errors)) for way in WAYS)
            largest = _signed(max(errors, key=abs))
            last = str(order) if order.all else ""
            rows.append((table.where, table.figure, str(len(errors)), *medians, largest, last))
    return rows


def _notes(part: Reproduction) -> Iterator[str]:
    """Machines, fits, and rows that are not predicted or counted."""
    paper = data.paper(part.names[0])
    yield from (f"off: {text}" for text in paper.misses)
    for cluster, stack in paper.clusters.items():
        yield f"{cluster} ({stack.base}): {stack.note}{'' if stack.fit else ' Nothing of it is fitted.'}"
    for f in part.fitted:
        known = PARAMETERS[f.fit.parameter]
        low, high, before = (known.shown(x) for x in (*f.fit.plausible, f.before))
        found = " to ".join(dict.fromkeys(known.shown(x) for x in (min(f.values), max(f.values))))
        yield (
            f"{f.cluster}, {known.label}: assumed {before}; fitted, a table left out, {found}; plausible {low} to "
            f"{high} ({f.fit.why})"
        )
    yield from (f"left out: {text}" for text in paper.left_out)
    for method, m in paper.methods.items():
        if m.incomplete:
            yield f"{method} is partly assumed, and never fitted to: {m.incomplete}"
    excuses = Counter(p.row.excuse for p in part.predicted if p.row.excuse)
    marks = Counter(p.row.mark for p in part.predicted if p.row.mark.startswith("contradicts"))
    for what, texts in (("predicted", excuses), ("counted", marks)):
        yield from (f"{n} {'row' if n == 1 else 'rows'} not {what}: {text}" for text, n in texts.items())


def _markdown(rows: Iterable[Cells]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *rest])


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.0f} %"


def _figure(row: Row, value: float | None) -> str:
    if value is None:
        return ""
    if row.figure == "speedup":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
