"""Report of a reproduction: ``docs/papers.md``, on the terminal, too, and row by row ``docs/papers.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from rich.console import Console

from cp_plugin.cli.tables import Cells
from cp_plugin.cli.terminal import print_lines
from evidence import data
from evidence.data import Row
from evidence.score import (
    TIMES,
    Predicted,
    aims,
    counted,
    in_order,
    median_error,
    pairs,
    ratio_errors,
    reproduce,
    stands_for,
)

COLUMNS = ("method", "model", "devices", "tokens", "published", "predicted", "error", "note")


def reproduce_and_show(asked: Iterable[str], console: Console) -> bool:
    """Print the page of these papers and, as the last line, the summary; return whether all aims are reached.

    Args:
        asked: names of papers, or ``all``.

    Raises:
        ValueError: for an unknown name.
    """
    names = tuple(dict.fromkeys(name for one in asked for name in data.names(one)))
    with Console(stderr=True).status("reading") as status:
        found = reproduce(names, status.update)
    reached = [aim.reached for aim in aims(found)]
    ok = bool(reached) and all(reached)
    last = f"{'PASS' if ok else 'FAIL'} {', '.join(names)}: {sum(reached)} of {len(reached)} aims reached"
    print_lines(console, *page(found).splitlines(), "", last)
    return ok


def of(found: Iterable[Predicted], name: str) -> list[Predicted]:
    """One paper's rows."""
    return [p for p in found if p.row.paper == name]


def cells(p: Predicted) -> Cells:
    """A row of a table."""
    row = p.row
    work = row.work.removeprefix("attention ") if row.work.startswith("attention ") else ""
    return (
        " / ".join(filter(None, (row.method, row.baseline))) + (f", {work}" if work else ""),
        row.model,
        str(row.devices) + (f" (tensor {row.tensor})" if row.tensor > 1 else ""),
        f"{row.length:,}" if row.length else "",
        _figure(row, row.published),
        _figure(row, p.value or None),
        _signed(p.error),
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


def page(found: Sequence[Predicted]) -> str:
    """The page in Markdown, without its head."""
    names = dict.fromkeys(p.row.paper for p in found)
    sources = "\n".join(f"- **{data.paper(name).title}**: {data.paper(name).source}" for name in names)
    listed = "\n".join(f"- {aim}" for aim in aims(found))
    parts = (
        listed,
        _markdown(_errors(found)),
        worth(found),
        _markdown(_methods(found)),
        _markdown(_by_provider(found)),
    )
    return "\n\n".join([*parts, "## Sources", sources])


def record(found: Iterable[Predicted], name: str) -> dict[str, object]:
    """All rows of a paper with their predictions, and what is known and assumed of its machines."""
    own = of(found, name)
    rows = {
        f"{table.where} ({table.figure})": [list(cells(p)) for p in own if p.row.table == table.id]
        for table in data.paper(name).tables
    }
    return {"notes": list(_notes(name, own)), "rows": rows}


def worth(found: Sequence[Predicted]) -> str:
    """Error of predicted ratios of methods, in words."""
    errors = ratio_errors(found)
    middle = f"median error {_percent(median(errors))}" if errors else "none to compare"
    return f"Ratio of two methods' times in the same setting ({len(errors)} pairs): {middle}."


def _parts(found: Sequence[Predicted]) -> list[tuple[str, Sequence[Predicted]]]:
    """Each paper's title and rows; of several papers, then all."""
    parts = [(data.paper(name).title, of(found, name)) for name in dict.fromkeys(p.row.paper for p in found)]
    return parts + [("all", found)] * (len(parts) > 1)


def _errors(found: Sequence[Predicted]) -> list[Cells]:
    """Median errors by paper and kind."""
    rows: list[Cells] = [("", "figures", "rows", "median error")]
    for title, own in _parts(found):
        kinds = {kind: (kind,) for kind in (*TIMES, "memory")} | ({"times": TIMES} if title == "all" else {})
        for words, kind in kinds.items():
            if (error := median_error(own, *kind)) is not None:
                rows.append((title, words, str(len(counted(own, *kind))), _percent(error)))
    if title == "all":
        errors = [median_error(own, *TIMES) or 0.0 for _, own in _parts(found)[:-1]]
        rows.append(("all, each paper weighing the same", "times", "", _percent(median(errors))))
    return rows


def _methods(found: Sequence[Predicted]) -> list[Cells]:
    """Order and ratios of methods."""
    rows: list[Cells] = [("", "pairs in the published order", "ratios off by")]
    for title, own in _parts(found):
        order, errors = in_order(own), ratio_errors(own)
        rows.append((title, str(order) if order.all else "", _percent(median(errors)) if errors else ""))
    return rows


def _by_provider(found: Sequence[Predicted]) -> list[Cells]:
    """Errors of ratios, by the provider of ours that is in them."""
    rows: list[Cells] = [("ratios with", "pairs", "off by")]
    for name in sorted({stands_for(p.row) for pair in pairs(found) for p in pair} - {""}):
        errors = ratio_errors(found, name)
        rows.append((f"`{name}`", str(len(errors)), _percent(median(errors))))
    return rows


def _notes(name: str, part: Sequence[Predicted]) -> Iterator[str]:
    """Machines, and rows that are not predicted or counted."""
    paper = data.paper(name)
    yield from (f"off: {text}" for text in paper.misses)
    yield from (f"{cluster} ({stack.base}): {stack.note}" for cluster, stack in paper.clusters.items())
    yield from (f"left out: {text}" for text in paper.left_out)
    yield from (f"{method} is partly assumed: {m.incomplete}" for method, m in paper.methods.items() if m.incomplete)
    excuses = Counter(p.row.excuse for p in part if p.row.excuse)
    marks = Counter(p.row.mark for p in part if p.row.mark.startswith("contradicts"))
    for what, texts in (("predicted", excuses), ("counted", marks)):
        yield from (f"{n} {'row' if n == 1 else 'rows'} not {what}: {text}" for text, n in texts.items())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


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
