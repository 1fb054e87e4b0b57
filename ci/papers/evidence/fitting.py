"""Cross-validated fits to published rows.

``with_a_table_left_out``   a machine's own parameters, fitted to its other tables
``with_a_paper_left_out``   parameters shared by machines (``stacks.SHARED``), fitted to all other papers

The best point of a grid over the plausible ranges is taken, so that predictions can be cached and no value is
implausible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import groupby, product
from operator import attrgetter

import numpy as np

from evidence import data, stacks
from evidence.data import Row
from evidence.experiment import predict
from evidence.stacks import SHARED, Machine, Stack

Values = tuple[float, ...]
POINTS = 9
"""Grid points per machine parameter."""
SHARED_POINTS = 3


@cache
def predicted(row: Row, own: Values = (), shared: Values = ()) -> float:
    """Predict a row with its machine as assumed, or with fitted values."""
    return predict(row, _machine(row.paper, row.cluster, own, shared))


def with_a_table_left_out(paper: str, cluster: str, table: str, rows: Iterable[Row]) -> Values:
    """Fit a machine's parameters to ``rows`` of its other tables; empty if there is nothing to fit."""
    others = [r for r in rows if _tells(r) and (r.paper, r.cluster) == (paper, cluster) and r.table != table]
    stack = _stack(paper, cluster)
    if not others or not stack.fit:
        return ()
    points = grid([f.plausible for f in stack.fit], stacks.assumed(stack), POINTS)
    return best(others, points, lambda r, own: predicted(r, own), attrgetter("table"))


def with_a_paper_left_out(name: str, rows: Iterable[Row]) -> Values:
    """Fit ``stacks.SHARED`` to ``rows`` of all other papers."""
    others = [r for r in rows if _tells(r) and r.paper != name]
    points = grid([s.plausible for s in SHARED], (1.0,) * len(SHARED), SHARED_POINTS)
    return best(others, points, lambda r, shared: predicted(r, (), shared), attrgetter("paper"))


def grid(ranges: Sequence[tuple[float, float]], assumed: Values, points: int) -> tuple[Values, ...]:
    """All combinations of assumed and ``points`` geometrically spaced values; assumptions first, to win ties."""
    sides = [
        dict.fromkeys([before, *map(float, np.geomspace(low, high, points))])
        for before, (low, high) in zip(assumed, ranges, strict=True)
    ]
    return tuple(product(*sides))


def best(
    rows: Iterable[Row], points: Sequence[Values], by: Callable[[Row, Values], float], group: Callable[[Row], str]
) -> Values:
    """The point with the lowest misfit; groups of rows weigh the same, whatever their size."""

    def cost(point: Values) -> float:
        return float(np.mean([misfit(own, [by(row, point) for row in own]) for own in groups]))

    groups = [tuple(own) for _, own in groupby(sorted(rows, key=group), group)]
    return min(points, key=cost)


def misfit(rows: Sequence[Row], values: Sequence[float]) -> float:
    """Mean absolute logarithm of predicted over published."""
    return float(np.mean(np.abs(np.log([v / (row.published or v) for row, v in zip(rows, values, strict=True)]))))


def _tells(row: Row) -> bool:
    """Whether it may be fitted to. No fitted parameter affects memory."""
    return row.can_be_fitted and row.kind != "memory"


def _stack(paper: str, cluster: str) -> Stack:
    return data.paper(paper).clusters[cluster]


@cache
def _machine(paper: str, cluster: str, own: Values, shared: Values) -> Machine:
    return stacks.machine(_stack(paper, cluster), own, shared)
