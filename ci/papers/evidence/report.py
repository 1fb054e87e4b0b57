"""A reproduction in words: on the terminal, and as the page ``docs/papers.md``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console

from cp_plugin.cli.tables import Cells, print_table
from evidence import data
from evidence.data import Row
from evidence.reproduce import Reproduction
from evidence.score import Predicted, median_error, pairs

COLUMNS = ("method", "model", "devices", "tokens", "published", "predicted", "error", "note")


def show(found: Reproduction, console: Console) -> None:
    """A table for each of the papers' tables, what was fitted, and the summary as the last line."""
    for name in found.names:
        part = found.of(name)
        console.print(f"\n{data.paper(name).title}: {data.paper(name).source}", style="bold", soft_wrap=True)
        for table in data.paper(name).tables:
            lines = [(cells(p), style(p)) for p in part.predicted if p.row.table == table.id]
            print_table(console, f"\n{table.where} [{table.figure}]", COLUMNS, lines)
        for text in (*map(str, part.fitted), *_left_out(name), *_not_predicted(part), str(part)):
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()
    if len(found.names) > 1:
        console.print(str(found), markup=False, highlight=False, soft_wrap=True)


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
        _figure(row, p.value),
        "" if p.error is None else f"{100 * p.error:+.0f} %",
        note(p),
    )


def note(p: Predicted) -> str:
    """What a row counts for."""
    row = p.row
    if row.published is None:
        return "out of memory" if row.mark == "OOM" else row.mark
    if row.excuse:
        return "not predicted"
    if row.mark:
        return row.mark.partition(":")[0]
    if p.fitted:
        return "fitted to"
    return "held out; never fitted to" if data.method(row, row.method).incomplete else "held out"


def style(p: Predicted) -> str:
    """How a row is shown on a terminal."""
    if not p.row.counts:
        return "dim"
    return "red" if p.error is not None and abs(p.error) > 0.25 else ""


def page(found: Reproduction) -> str:
    """The page on papers, in Markdown, without its head."""
    return "\n\n".join([_summary(found), *(section(found, name) for name in found.names)])


def section(found: Reproduction, name: str) -> str:
    """What the page has on one paper."""
    part, paper = found.of(name), data.paper(name)
    listed = (*_machines(name), *_left_out(name), *_not_predicted(part))
    return "\n\n".join(
        [
            f"## {paper.title}",
            f"{paper.source}.",
            f"![Predicted beside published](images/papers/{name}.svg)",
            f"**{part}**",
            _fitted(part),
            _by_table(part),
            "\n".join(f"- {text}" for text in listed),
            _details(part),
        ]
    )


def _summary(found: Reproduction) -> str:
    rows = [
        "| paper | rows | compared | held out | median error | nothing fitted | in the published order | result |",
        "|---" * 8 + "|",
    ]
    for part in [*map(found.of, found.names), found]:
        title = data.paper(part.names[0]).title if len(part.names) == 1 else "**all**"
        compared = sum(p.row.counts for p in part.predicted)
        rows.append(
            f"| {title} | {len(part.predicted)} | {compared} | {part.judged} | {100 * part.error:.1f} % | "
            f"{100 * part.unfitted_error:.1f} % | {part.pairs.right} of {part.pairs.all} | "
            f"{'PASS' if part.ok else 'FAIL'} |"
        )
    return "\n".join(rows)


def _fitted(part: Reproduction) -> str:
    rows = ["| fitted, of one machine | value | rows | plausible | |", "|---" * 5 + "|"]
    for f in part.fitted:
        low, high = (f.known.shown(x) for x in f.fit.plausible)
        verdict = "" if f.plausible else "**outside**"
        rows.append(
            f"| {f.cluster}: {f.known.label} | {f.known.shown(f.value)} (assumed {f.known.shown(f.before)}) | {f.rows} "
            f"| {low} to {high}: {f.fit.why} | {verdict} |"
        )
    return "\n".join(rows)


def _by_table(part: Reproduction) -> str:
    rows = ["| table | figure | held out | median error | largest | in order, of all |", "|---" * 6 + "|"]
    for table in data.paper(part.names[0]).tables:
        own = [p for p in part.predicted if p.row.table == table.id]
        errors = [p.error for p in own if p.judged and p.error is not None]
        if errors:
            ranked = pairs(own, held_out=False)
            order = f"{ranked.right} of {ranked.all}" if ranked.all else ""
            rows.append(
                f"| {table.where} | {table.figure} | {len(errors)} | {100 * median_error(own):.1f} % | "
                f"{100 * max(errors, key=abs):+.0f} % | {order} |"
            )
    return "\n".join(rows)


def _details(part: Reproduction) -> str:
    """All rows, folded away."""
    lines = ["<details><summary>all rows</summary>", ""]
    for table in data.paper(part.names[0]).tables:
        lines += [f"{table.where} ({table.figure})", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        lines += [f"| {' | '.join(cells(p))} |" for p in part.predicted if p.row.table == table.id]
        lines.append("")
    return "\n".join([*lines, "</details>"])


def _machines(name: str) -> Iterator[str]:
    for cluster, stack in data.paper(name).clusters.items():
        yield f"{cluster} ({stack.base}): {stack.note}"


def _left_out(name: str) -> Iterator[str]:
    yield from (f"left out: {text}" for text in data.paper(name).left_out)


def _not_predicted(part: Reproduction) -> Iterator[str]:
    excuses = Counter(p.row.excuse for p in part.predicted if p.row.excuse)
    marks = Counter(p.row.mark for p in part.predicted if p.row.mark.startswith("contradicts"))
    for method, m in data.paper(part.names[0]).methods.items():
        if m.incomplete:
            yield f"{method} is never fitted to: {m.incomplete}"
    for text, n in excuses.items():
        yield f"{n} {_rows(n)} not predicted: {text}"
    for text, n in marks.items():
        yield f"{n} {_rows(n)} not counted: {text}"


def _rows(n: int) -> str:
    return "row" if n == 1 else "rows"


def _figure(row: Row, value: float | None) -> str:
    if value is None:
        return ""
    if row.figure == "speedup":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
