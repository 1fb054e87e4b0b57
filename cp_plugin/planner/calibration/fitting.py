"""Non-negative least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np


class Fit(NamedTuple):
    """``seconds ~ work @ figures``."""

    figures: tuple[float, ...]
    """Seconds per unit of each kind of work, none negative."""
    error: float
    """Root mean square of the relative errors."""


def fit(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Fit seconds per unit of work; ValueError for fewer measurements than figures, or a time that is not positive.

    work: ``[measurement, kind]``, amount of each kind of work.
    """
    rows, taken = np.asarray(work, dtype=float), np.asarray(seconds, dtype=float)
    if len(rows) < rows.shape[1]:
        raise ValueError(f"{len(rows)} measurements cannot give {rows.shape[1]} figures")
    if not (taken > 0).all():
        raise ValueError(f"times must be positive, not {taken.min():g} s")
    relative = rows / taken[:, None]
    columns = range(rows.shape[1])
    found = [_of(relative, list(chosen)) for n in columns for chosen in combinations(columns, n + 1)]
    return min((f for f in found if min(f.figures) >= 0), key=lambda f: f.error)


def _of(relative: np.ndarray, chosen: list[int]) -> Fit:
    """Unconstrained fit of the chosen columns, scaled because they differ by many orders of magnitude."""
    columns = relative[:, chosen]
    scale = np.abs(columns).max(0)
    scale[scale == 0] = 1
    solved = np.linalg.lstsq(columns / scale, np.ones(len(relative)), rcond=None)[0] / scale
    error = float(np.sqrt(np.mean((columns @ solved - 1) ** 2)))
    figures = np.zeros(relative.shape[1])
    figures[chosen] = solved
    return Fit(tuple(figures.tolist()), error)
