"""Predictions of published rows with nothing fitted, their errors, order and ratios of methods, and the report.

The report is ``docs/papers.md``, on the terminal, too, and row by row ``docs/papers.json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

from rich.console import Console

from cp_plugin.cli.output import print_lines
from cp_plugin.cli.tables import Cells
from evidence import data
from evidence.data import Kind, Row, method
from evidence.experiment import predict

TIMES: tuple[Kind, ...] = ("ratios", "absolute times")
ERROR, ORDER = 0.10, 0.85
"""Targets: the median error of times, and the share of pairs of methods in the published order."""
_OVERLAPPED = "-overlapped"
"""Of a method that only the papers' predictions have: ``overlapped.py``."""
DIFFERENT = 0.10
"""Methods closer than this are not ranked."""
COLUMNS = ("method", "model", "devices", "tokens", "published", "predicted", "error", "note")


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row and its prediction."""

    row: Row
    value: float = 0.0
    """0: not predicted."""

    @property
    def error(self) -> float | None:
        """Predicted over published, minus one; None where either is missing."""
        return self.value / self.row.published - 1 if self.value and self.row.published else None


class Share(NamedTuple):
    """A success count."""

    right: int
    all: int

    def __str__(self) -> str:
        return f"{self.right} of {self.all}"


class Aim(NamedTuple):
    """An accuracy target."""

    name: str
    value: float
    limit: float
    least: bool = False
    """The limit is a minimum."""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit

    def __str__(self) -> str:
        return (
            f"{'PASS' if self.reached else 'FAIL'} {self.name}: {100 * self.value:.1f} % (aim: at "
            f"{'least' if self.least else 'most'} {100 * self.limit:.1f} %)"
        )


def reproduce(names: Sequence[str], say: Callable[[str], None] = lambda text: None) -> list[Predicted]:
    """Predict all rows of these papers; ``say`` is a progress callback."""
    found = []
    for name in names:
        say(f"predicting {name}")
        found += [Predicted(row, predict(row)) if row.published and not row.excuse else Predicted(row)
                  for row in data.rows(name)]  # fmt: skip
    return found


def aims(predicted: Sequence[Predicted]) -> list[Aim]:
    """Targets for times that have rows."""
    error, order = median_error(predicted, *TIMES), in_order(predicted)
    found = [] if error is None else [Aim("median error of times", error, ERROR)]
    if order.all:
        name = f"methods in the published order ({order} pairs)"
        found.append(Aim(name, order.right / order.all, ORDER, least=True))
    return found


def counted(predicted: Iterable[Predicted], *kinds: Kind) -> list[Predicted]:
    """Rows that count and are predicted."""
    return [p for p in predicted if p.row.kind in kinds and p.row.counts and p.value]


def median_error(predicted: Iterable[Predicted], *kinds: Kind) -> float | None:
    """Median absolute error of rows that count; None without rows."""
    errors = [abs(p.error or 0.0) for p in counted(predicted, *kinds)]
    return median(errors) if errors else None


def pairs(predicted: Iterable[Predicted]) -> list[tuple[Predicted, Predicted]]:
    """Pairs of methods in one setting of one table, against the same baseline if any."""
    by_setting: dict[tuple[object, ...], list[Predicted]] = {}
    for p in counted(predicted, *TIMES):
        by_setting.setdefault((*p.row.setting, p.row.table, p.row.baseline), []).append(p)
    return [pair for group in by_setting.values() for pair in combinations(group, 2)]


def in_order(predicted: Iterable[Predicted]) -> Share:
    """Of pairs that differ by more than a tenth, those in the published order."""
    found = [
        (a.value > b.value) == (_published(a) > _published(b))
        for a, b in pairs(predicted)
        if max(_published(a), _published(b)) > (1 + DIFFERENT) * min(_published(a), _published(b))
    ]
    return Share(sum(found), len(found))


def ratio_errors(predicted: Iterable[Predicted], provider: str = "") -> list[float]:
    """Errors of the ratios of two methods, faster over slower.

    Args:
        provider: of the pairs in which it stands for one of the methods; empty: of all.
    """
    errors = []
    for pair in pairs(predicted):
        if not provider or any(stands_for(p.row) == provider for p in pair):
            slow, fast = sorted(pair, key=_published)
            errors.append(abs(fast.value / slow.value * _published(slow) / _published(fast) - 1))
    return errors


def stands_for(row: Row) -> str:
    """The provider of ours that stands for a row's method; empty: none."""
    return method(row, row.method).provider.removesuffix(_OVERLAPPED)


def _published(p: Predicted) -> float:
    assert p.row.published is not None
    return p.row.published


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
