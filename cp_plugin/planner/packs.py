"""Packed documents: the work of each rank by layout, and stock Megatron's per-document division.

Zigzag over a whole pack ignores document boundaries, so some ranks do several times the work of others. Stock Megatron
pads each document to a multiple of twice the ranks and divides each over all of them. The ``documents`` layout is built
for the lengths at hand (``engine.placement``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch

from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.core.layout import LAYOUTS, Layout, Segments
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.engine.placement.pairs import Ints


def divide_each(problem: Problem) -> Problem:
    """The problem as stock Megatron runs it: each document padded and divided over all ranks in zigzag."""
    lengths = [end - start for start, end in pairwise(problem.bounds)]
    bounds = tuple(accumulate(padded(lengths, problem.size), initial=0))
    within_each = Layout("zigzag", LAYOUTS["zigzag"].chunks, _InEach(bounds))
    return replace(problem, seq_length=bounds[-1], bounds=bounds, placed=within_each)


def padded(lengths: Sequence[int], size: int) -> tuple[int, ...]:
    """Document lengths rounded up to a multiple of twice the ranks."""
    return tuple(2 * size * -(-length // (2 * size)) for length in lengths)


def pairs(problem: Problem) -> int:
    """Visible (query, key) pairs of one sequence and head."""
    return int(_seen(problem.mask(), problem.seq_length).sum())


def work(setup: Setup) -> Ints:
    """Visible (query, key) pairs of each rank's own queries, of one sequence and head: ``[size]``."""
    problem = setup.problem
    layout = problem.placed or get_layout(setup.layout)
    return _work(layout, problem.size, problem.mask(), problem.seq_length)


def balance(setup: Setup) -> float:
    """The busiest rank's work over the mean, if every rank computes what its own queries see."""
    of_each = work(setup)
    return float(of_each.max() * len(of_each) / of_each.sum())


@dataclass(frozen=True, slots=True)
class _InEach:
    """``Layout.place`` of zigzag within each document."""

    bounds: tuple[int, ...]

    def __call__(self, seq_length: int, size: int, index: int) -> Segments:
        return tuple(
            range(start + s.start, start + s.stop)
            for start, end in pairwise(self.bounds)
            for s in LAYOUTS["zigzag"].segments(end - start, size, index)
        )


@lru_cache(8)
def _seen(mask: Mask, seq_length: int) -> Ints:
    """Number of keys visible to each query."""
    first, end = mask.interval(torch.arange(seq_length), seq_length)
    return (end - first).numpy()


@lru_cache(32)
def _work(layout: Layout, size: int, mask: Mask, seq_length: int) -> Ints:
    seen = _seen(mask, seq_length)
    ranks = (layout.segments(seq_length, size, index) for index in range(size))
    return np.array([sum(int(seen[s.start : s.stop : s.step].sum()) for s in segments) for segments in ranks])
