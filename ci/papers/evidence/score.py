"""Scores of predictions: errors, order of methods, and nearest-neighbour baselines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import log2
from statistics import median
from typing import Literal, get_args

from evidence.data import Row, method

Way = Literal["zero fit", "a table left out", "a paper left out", "copied: same table", "copied: another table"]
"""By the planner, with the machine as assumed or fitted to other tables or papers; or by copying the published figure
of the most similar row of the same or another table."""
WAYS: tuple[Way, ...] = get_args(Way)
PLANNER, COPIED = WAYS[:3], WAYS[3:]
_OVERLAPPED = "-overlapped"
"""Of a method that only the papers' predictions have: ``overlapped.py``."""
DIFFERENT = 0.10
"""Methods closer than this are not ranked."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """A row and its predictions."""

    row: Row
    values: Mapping[Way, float] = field(default_factory=dict)
    """Without the ways in which it is not predicted."""

    def error(self, way: Way) -> float | None:
        """Predicted over published, minus one; None where either is missing."""
        if way not in self.values or self.row.published is None:
            return None
        return self.values[way] / self.row.published - 1


@dataclass(frozen=True, slots=True)
class Share:
    """A success count."""

    right: int
    all: int

    @property
    def share(self) -> float:
        """1 without cases."""
        return self.right / self.all if self.all else 1.0

    def __str__(self) -> str:
        return f"{self.right} of {self.all}"


def counted(predicted: Iterable[Predicted], *ways: Way) -> list[Predicted]:
    """Rows that count and are predicted in all of these ways."""
    return [p for p in predicted if p.row.counts and all(way in p.values for way in ways)]


def median_error(predicted: Iterable[Predicted], way: Way) -> float | None:
    """Median absolute error of rows that count; None without rows."""
    errors = [abs(p.error(way) or 0.0) for p in counted(predicted, way)]
    return median(errors) if errors else None


def pairs(predicted: Iterable[Predicted], way: Way) -> list[tuple[Predicted, Predicted]]:
    """Pairs of methods in one setting of one table, against the same baseline if any."""
    by_setting: dict[tuple[object, ...], list[Predicted]] = {}
    for p in counted(predicted, way):
        if p.row.kind != "memory":
            by_setting.setdefault((*p.row.setting, p.row.table, p.row.baseline), []).append(p)
    return [pair for group in by_setting.values() for pair in combinations(group, 2)]


def in_order(predicted: Iterable[Predicted], way: Way) -> Share:
    """Of pairs that differ by more than a tenth, those in the published order."""
    found = [
        (a.values[way] > b.values[way]) == (_published(a) > _published(b))
        for a, b in pairs(predicted, way)
        if max(_published(a), _published(b)) > (1 + DIFFERENT) * min(_published(a), _published(b))
    ]
    return Share(sum(found), len(found))


def over_baseline(predicted: Iterable[Predicted], way: Way) -> Share:
    """Of speedups and slowdowns by more than a tenth, those predicted on the same side of 1."""
    found = [
        (p.values[way] > 1) == (_published(p) > 1)
        for p in counted(predicted, way)
        if p.row.figure == "speedup" and not 1 / (1 + DIFFERENT) <= _published(p) <= 1 + DIFFERENT
    ]
    return Share(sum(found), len(found))


def ratio_error(predicted: Iterable[Predicted], way: Way, provider: str = "") -> float | None:
    """Median error of the ratio of two methods, faster over slower; None without pairs.

    Args:
        provider: of the pairs in which it stands for one of the methods; empty: of all.
    """
    errors = []
    for pair in pairs(predicted, way):
        if provider and all(stands_for(p.row) != provider for p in pair):
            continue
        slow, fast = sorted(pair, key=_published)
        errors.append(abs(fast.values[way] / slow.values[way] * _published(slow) / _published(fast) - 1))
    return median(errors) if errors else None


def stands_for(row: Row) -> str:
    """The provider of ours that stands for a row's method; empty: none."""
    return method(row, row.method).provider.removesuffix(_OVERLAPPED)


def neighbours(row: Row, rows: Sequence[Row]) -> dict[Way, float]:
    """The published figures of the most similar rows, of its table and of other tables.

    Similar rows have the same figure, work and methods; they are ranked by machine, then by distance in length,
    devices, tensor parallelism and batch, then by model.
    """
    like = [r for r in rows if r is not row and r.counts and _what(r) == _what(row)]
    found: dict[Way, float] = {}
    for way, own in zip(COPIED, (True, False), strict=True):
        near = [r for r in like if ((r.paper, r.table) == (row.paper, row.table)) == own]
        if near:
            found[way] = min(near, key=lambda r: _distance(row, r)).published or 0.0
    return found


def _what(row: Row) -> tuple[str, ...]:
    return row.figure, row.work, row.method, row.baseline


def _distance(a: Row, b: Row) -> tuple[bool, float, bool]:
    sizes = ((a.length, b.length), (a.devices, b.devices), (a.tensor, b.tensor), (a.batch, b.batch))
    return a.cluster != b.cluster, sum(abs(log2(x / y)) for x, y in sizes), a.model != b.model


def _published(p: Predicted) -> float:
    assert p.row.published is not None
    return p.row.published
