"""What is fitted to published rows, and to which: to others than the one that is judged.

``with_a_table_left_out``   a machine's own parameters, to all other tables that were measured on it
``with_a_paper_left_out``   what machines have in common (``stacks.SHARED``), to all other papers

Values are those of a grid over the plausible ranges where the rows' errors are least, so that none is outside, and no
row is predicted more than once for all that may be left out.
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
"""Of each of a machine's own parameters."""
SHARED_POINTS = 3


@cache
def predicted(row: Row, own: Values = (), shared: Values = ()) -> float:
    """What the planner makes of a row: as its machine is assumed, or with fitted values."""
    return predict(row, _machine(row.paper, row.cluster, own, shared))


def with_a_table_left_out(paper: str, cluster: str, table: str, rows: Iterable[Row]) -> Values:
    """Of a machine, fitted to ``rows`` of its other tables; nothing where there are none, or nothing may be fitted."""
    others = [r for r in rows if _tells(r) and (r.paper, r.cluster) == (paper, cluster) and r.table != table]
    stack = _stack(paper, cluster)
    if not others or not stack.fit:
        return ()
    points = grid([f.plausible for f in stack.fit], stacks.assumed(stack), POINTS)
    return best(others, points, lambda r, own: predicted(r, own), attrgetter("table"))


def with_a_paper_left_out(name: str, rows: Iterable[Row]) -> Values:
    """Of ``stacks.SHARED``, fitted to ``rows`` of all papers but this one."""
    others = [r for r in rows if _tells(r) and r.paper != name]
    points = grid([s.plausible for s in SHARED], (1.0,) * len(SHARED), SHARED_POINTS)
    return best(others, points, lambda r, shared: predicted(r, (), shared), attrgetter("paper"))


def grid(ranges: Sequence[tuple[float, float]], assumed: Values, points: int) -> tuple[Values, ...]:
    """What is assumed and so many figures of each range, in equal ratios from end to end, in all combinations.

    What is assumed comes first, and so stays where rows do not tell.
    """
    sides = [
        dict.fromkeys([before, *map(float, np.geomspace(low, high, points))])
        for before, (low, high) in zip(assumed, ranges, strict=True)
    ]
    return tuple(product(*sides))


def best(
    rows: Iterable[Row], points: Sequence[Values], by: Callable[[Row, Values], float], group: Callable[[Row], str]
) -> Values:
    """The point where rows are predicted best. Groups of rows weigh the same, however many rows they have."""

    def cost(point: Values) -> float:
        return float(np.mean([misfit(own, [by(row, point) for row in own]) for own in groups]))

    groups = [tuple(own) for _, own in groupby(sorted(rows, key=group), group)]
    return min(points, key=cost)


def misfit(rows: Sequence[Row], values: Sequence[float]) -> float:
    """Mean absolute logarithm of predicted over published: a factor of two up is as bad as a factor of two down."""
    return float(np.mean(np.abs(np.log([v / (row.published or v) for row, v in zip(rows, values, strict=True)]))))


def _tells(row: Row) -> bool:
    """Whether something may be fitted to it. Memory is predicted without any of what is fitted."""
    return row.can_be_fitted and row.kind != "memory"


def _stack(paper: str, cluster: str) -> Stack:
    return data.paper(paper).clusters[cluster]


@cache
def _machine(paper: str, cluster: str, own: Values, shared: Values) -> Machine:
    return stacks.machine(_stack(paper, cluster), own, shared)
