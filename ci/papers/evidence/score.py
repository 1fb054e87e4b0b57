"""Errors of predictions, and whether they put methods in the published order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from evidence.data import Row

DIFFERENT = 0.10
"""Methods that differ by no more are not ranked."""
LARGEST_ERROR, LEAST_RIGHT = 0.12, 0.90
"""Median error of rows that were held out; share of pairs in the right order."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row and what became of it."""

    row: Row
    value: float | None
    """None: not predicted."""
    fitted: bool = False
    """Whether parameters were fitted to it."""
    unfitted: float | None = None
    """What is predicted with every parameter as it was assumed."""

    @property
    def error(self) -> float | None:
        """Predicted over published, minus one; None where one of them is missing."""
        if self.value is None or self.row.published is None:
            return None
        return self.value / self.row.published - 1

    @property
    def judged(self) -> bool:
        """Whether its error counts."""
        return self.row.counts and self.value is not None and not self.fitted


@dataclass(frozen=True, slots=True)
class Pairs:
    """How many pairs of methods are in the published order."""

    right: int
    all: int

    @property
    def share(self) -> float:
        """1 where there are none."""
        return self.right / self.all if self.all else 1.0


def median_error(predicted: Iterable[Predicted]) -> float:
    """Median absolute error of the rows that count; 0 where there are none."""
    errors = [abs(p.error) for p in predicted if p.judged and p.error is not None]
    return median(errors) if errors else 0.0


def pairs(predicted: Sequence[Predicted], *, held_out: bool) -> Pairs:
    """Pairs of methods in one setting whose published figures differ by more than a tenth.

    A speedup is a pair of its own: the method and its baseline. ``held_out``: only of rows that nothing was fitted to.
    """
    found = [p for p in predicted if p.row.counts and p.value is not None and not (held_out and p.fitted)]
    outcomes = [_same_side(p.value, p.row.published, 1.0, 1.0) for p in found if p.row.figure == "speedup"]
    by_setting: dict[tuple[object, ...], list[Predicted]] = {}
    for p in found:
        if p.row.figure != "GB":
            by_setting.setdefault((*p.row.setting, p.row.table, p.row.baseline), []).append(p)
    for group in by_setting.values():
        for a, b in combinations(group, 2):
            outcomes.append(_same_side(a.value, a.row.published, b.value, b.row.published))
    ranked = [outcome for outcome in outcomes if outcome is not None]
    return Pairs(sum(ranked), len(ranked))


def _same_side(a: float | None, published_a: float | None, b: float | None, published_b: float | None) -> bool | None:
    """Whether two are in the published order; None where that order is not clear."""
    assert a is not None and b is not None and published_a is not None and published_b is not None
    if max(published_a, published_b) <= (1 + DIFFERENT) * min(published_a, published_b):
        return None
    return (a > b) == (published_a > published_b)


def fitted(rows: Sequence[Row]) -> list[bool]:
    """The rule of which rows parameters are fitted to: of those of a machine that can be, in file order, the first, the
    third and so on. All others are held out."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for row in rows:
        at = seen.get((row.paper, row.cluster), 0)
        found.append(row.can_be_fitted and at % 2 == 0)
        seen[row.paper, row.cluster] = at + row.can_be_fitted
    return found
