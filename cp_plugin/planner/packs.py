"""Packed documents: who works how much on which layout, and how stock Megatron divides them.

Zigzag over the whole pack is blind to them: some ranks work several times as much as others. Stock Megatron pads each
document to a multiple of twice the ranks, and divides each over all of them. The layout ``documents`` is made for their
lengths (``cp_plugin.placement``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch

from cp_plugin.attention.setups import Setup
from cp_plugin.core.layout import LAYOUTS, Layout, Segments
from cp_plugin.core.mask import Mask
from cp_plugin.core.problem import Problem
from cp_plugin.placement.layouts import get_layout
from cp_plugin.placement.pairs import Ints


def in_each(problem: Problem) -> Problem:
    """The same as stock Megatron has it: each document padded, and divided over all ranks in zigzag."""
    lengths = [end - start for start, end in pairwise(problem.bounds)]
    bounds = tuple(accumulate(padded(lengths, problem.size), initial=0))
    return replace(problem, seq_length=bounds[-1], bounds=bounds, placed=each_by_itself(bounds))


def padded(lengths: Sequence[int], size: int) -> tuple[int, ...]:
    """The lengths of documents that are each cut into twice as many equal chunks as there are ranks."""
    return tuple(2 * size * -(-length // (2 * size)) for length in lengths)


def each_by_itself(bounds: Sequence[int]) -> Layout:
    """Every document zigzag over all ranks; the layout refuses documents that are not whole chunks."""
    return Layout("zigzag", LAYOUTS["zigzag"].chunks, _InEach(tuple(bounds)))


def layout_of(setup: Setup) -> Layout:
    """Whose tokens are where."""
    return setup.problem.placed or get_layout(setup.layout)


def pairs(problem: Problem) -> int:
    """Visible (query, key) pairs of one sequence and head."""
    return int(_seen(problem.mask(), problem.seq_length).sum())


def work(setup: Setup) -> Ints:
    """The (query, key) pairs of each rank's own queries, of one sequence and head: ``[size]``."""
    problem = setup.problem
    return _work(layout_of(setup), problem.size, problem.mask(), problem.seq_length)


def balance(setup: Setup) -> float:
    """The work of the busiest rank over the mean, if every rank computes what its own queries see."""
    of_each = work(setup)
    return float(of_each.max() * len(of_each) / of_each.sum())


@dataclass(frozen=True, slots=True)
class _InEach:
    """Zigzag in each document: a chunk of it and its mirror image."""

    bounds: tuple[int, ...]

    def __call__(self, seq_length: int, size: int, index: int) -> Segments:
        """The segments of a rank, as ``Layout.place`` gives them."""
        of_one = LAYOUTS["zigzag"].segments
        return tuple(
            range(start + s.start, start + s.stop)
            for start, end in pairwise(self.bounds)
            for s in of_one(end - start, size, index)
        )


@lru_cache(8)
def _seen(mask: Mask, seq_length: int) -> Ints:
    """How many keys each query sees."""
    first, end = mask.interval(torch.arange(seq_length), seq_length)
    return (end - first).numpy()


@lru_cache(32)
def _work(layout: Layout, size: int, mask: Mask, seq_length: int) -> Ints:
    seen = _seen(mask, seq_length)
    ranks = (layout.segments(seq_length, size, index) for index in range(size))
    return np.array([sum(int(seen[s.start : s.stop : s.step].sum()) for s in segments) for segments in ranks])
