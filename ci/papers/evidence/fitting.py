"""Fitting one or two positive parameters; the same numbers on every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import exp, log

import numpy as np

FIRST, THEN = 7, 5
"""Points on each side of the first grid, and of the finer ones around its best point."""
FINER = 5
"""Of these; each halves the steps."""


def minimise(cost: Callable[[tuple[float, ...]], float], ranges: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Where a function of a few positive numbers is least: the best point of a grid, and of finer ones around it.

    Ranges are divided into equal ratios. Grids follow a valley that lies across them, as searches along one parameter
    after the other do not.
    """
    known = cache(lambda at: cost(tuple(map(exp, at))))
    lows, highs = ([log(limits[i]) for limits in ranges] for i in range(2))
    steps = [(high - low) / (FIRST - 1) for low, high in zip(lows, highs, strict=True)]
    best = _best(known, [np.linspace(low, high, FIRST) for low, high in zip(lows, highs, strict=True)])
    for _ in range(FINER):
        steps = [step / 2 for step in steps]
        reach = range(-(THEN // 2), THEN // 2 + 1)
        around = zip(best, steps, lows, highs, strict=True)
        best = _best(known, [[min(max(x + i * step, low), high) for i in reach] for x, step, low, high in around])
    return tuple(map(exp, best))


def _best(known: Callable[[tuple[float, ...]], float], sides: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The point of a grid where the cost is least. Points that grids share are computed once, but for rounding."""
    return min(product(*([round(float(x), 12) for x in side] for side in sides)), key=known)


def misfit(predicted: Sequence[float], published: Sequence[float]) -> float:
    """Mean absolute logarithm of their ratios: a factor of two up is as bad as a factor of two down."""
    return float(np.mean(np.abs(np.log(np.asarray(predicted) / np.asarray(published)))))
