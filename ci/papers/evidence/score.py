"""Predictions of published rows with nothing fitted, and their scores: errors, order and ratios of methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

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
