"""Predictions of published rows with nothing fitted, and their errors, as a page: ``docs/papers.md``, or printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

from rich.console import Console

from cp_plugin.tools.output import print_lines
from cp_plugin.tools.tables import Cells
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


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row and its prediction."""

    row: Row
    value: float

    @property
    def error(self) -> float:
        """Predicted over published, minus one."""
        return self.value / self.row.published - 1


Pair = tuple[Predicted, Predicted]


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
    predicted = []
    for name in names:
        say(f"predicting {name}")
        predicted += [Predicted(row, predict(row)) for row in data.rows(name)]
    return predicted


def aims(predicted: Sequence[Predicted]) -> list[Aim]:
    """Targets for times that have rows."""
    errors, order = errors_of(predicted, *TIMES), compare_order(pairs(predicted))
    targets = [Aim("median error of times", median(errors), ERROR)] if errors else []
    if order:
        name = f"methods in the published order ({_share(order)} pairs)"
        targets.append(Aim(name, sum(order) / len(order), ORDER, least=True))
    return targets


def errors_of(predicted: Iterable[Predicted], *kinds: Kind) -> list[float]:
    """Absolute errors of the rows of these kinds."""
    return [abs(p.error) for p in predicted if p.row.kind in kinds]


def pairs(predicted: Iterable[Predicted]) -> list[Pair]:
    """Times of two methods in one setting of one table, against the same baseline if any."""
    by_setting: dict[tuple[object, ...], list[Predicted]] = {}
    for p in predicted:
        if p.row.kind in TIMES:
            by_setting.setdefault((*p.row.setting, p.row.table, p.row.baseline), []).append(p)
    return [pair for group in by_setting.values() for pair in combinations(group, 2)]


def compare_order(some: Iterable[Pair]) -> list[bool]:
    """Of each pair that differs by more than a tenth, whether it is in the published order."""
    return [
        (a.value > b.value) == (a.row.published > b.row.published)
        for a, b in some
        if max(a.row.published, b.row.published) > (1 + DIFFERENT) * min(a.row.published, b.row.published)
    ]


def ratio_errors(some: Iterable[Pair]) -> list[float]:
    """Errors of the ratios of two methods, faster over slower."""
    ordered = (sorted(pair, key=lambda p: p.row.published) for pair in some)
    return [abs(fast.value / slow.value * slow.row.published / fast.row.published - 1) for slow, fast in ordered]


def stands_for(row: Row) -> str:
    """The provider of ours that stands for a row's method; empty: none."""
    return method(row, row.method).provider.removesuffix(_OVERLAPPED)


def reproduce_and_show(papers: Iterable[str], console: Console) -> bool:
    """Print the page of these papers, or of ``all``, and, as the last line, the summary; return whether all aims are
    reached. ValueError for an unknown name."""
    names = tuple(dict.fromkeys(name for paper in papers for name in data.names(paper)))
    with Console(stderr=True).status("reading") as status:
        predicted = reproduce(names, status.update)
    reached = [aim.reached for aim in aims(predicted)]
    ok = bool(reached) and all(reached)
    last = f"{'PASS' if ok else 'FAIL'} {', '.join(names)}: {sum(reached)} of {len(reached)} aims reached"
    print_lines(console, *page(predicted).splitlines(), "", last)
    return ok


def page(predicted: Sequence[Predicted]) -> str:
    """The page in Markdown, without its head."""
    names = dict.fromkeys(p.row.paper for p in predicted)
    sources = "\n".join(f"- **{data.paper(name).title}**: {data.paper(name).source}" for name in names)
    listed = "\n".join(f"- {aim}" for aim in aims(predicted))
    return "\n\n".join([listed, _markdown(_errors(predicted)), _markdown(_ratios(predicted)), "## Sources", sources])


def _parts(predicted: Sequence[Predicted]) -> list[tuple[str, Sequence[Predicted]]]:
    """Each paper's title and rows; of several papers, then all."""
    by_paper: dict[str, list[Predicted]] = {}
    for p in predicted:
        by_paper.setdefault(data.paper(p.row.paper).title, []).append(p)
    return [*by_paper.items(), *[("all", predicted)] * (len(by_paper) > 1)]


def _errors(predicted: Sequence[Predicted]) -> list[Cells]:
    """Median errors by paper and kind."""
    rows: list[Cells] = [("", "figures", "rows", "median error")]
    for title, own in _parts(predicted):
        kinds = {kind: (kind,) for kind in (*TIMES, "memory")} | ({"times": TIMES} if title == "all" else {})
        for words, kind in kinds.items():
            if errors := errors_of(own, *kind):
                rows.append((title, words, str(len(errors)), _percent(median(errors))))
    if title == "all":
        by_paper = [median(errors_of(own, *TIMES)) for _, own in _parts(predicted)[:-1]]
        rows.append(("all, each paper weighing the same", "times", "", _percent(median(by_paper))))
    return rows


def _ratios(predicted: Sequence[Predicted]) -> list[Cells]:
    """Order and ratios of two methods in the same setting, by paper, and by the provider of ours that is in them."""
    rows: list[Cells] = [("ratio of two methods' times", "pairs", "in the published order", "median error")]
    groups = [(title, pairs(own)) for title, own in _parts(predicted)]
    every = pairs(predicted)
    for name in sorted({stands_for(p.row) for pair in every for p in pair} - {""}):
        groups.append((f"`{name}`", [pair for pair in every if name in (stands_for(p.row) for p in pair)]))
    for title, some in groups:
        if some:
            rows.append((title, str(len(some)), _share(compare_order(some)), _percent(median(ratio_errors(some)))))
    return rows


def _share(reached: Sequence[bool]) -> str:
    return f"{sum(reached)} of {len(reached)}" if reached else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _markdown(rows: Iterable[Cells]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * (head.count(" | ") + 1) + "|", *rest])
