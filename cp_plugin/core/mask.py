"""Which keys a query sees, by their positions in the whole sequence: causal, full, a sliding window, documents."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

Window = tuple[int, int]
"""How many tokens before and after itself a token sees, -1: all of them; as in flash-attn and Transformer Engine."""


class Mask(NamedTuple):
    """A query at position p sees the keys at ``p - left .. p + right`` of its own document."""

    left: int | None = None
    """None: no limit."""
    right: int | None = None
    """None: no limit; 0: causal."""
    documents: tuple[int, ...] = ()
    """Where the documents begin, and the length of the sequence; empty: one document."""

    @classmethod
    def of(cls, causal: bool, window: Window | None = None, documents: tuple[int, ...] = ()) -> Mask:
        """From what callers give. Under a causal mask nothing after a token is seen, whatever the window."""
        left, right = (None if n == -1 else n for n in window or (-1, -1))
        return cls(left, 0 if causal else right, documents)

    @property
    def full(self) -> bool:
        """Every query sees every key, whatever their positions."""
        return self.left is None and self.right is None and not self.documents

    @property
    def windowed(self) -> bool:
        """A query does not see all that is before it in its document."""
        return self.left is not None

    @property
    def width(self) -> float:
        """How many neighbouring positions a query sees of a document that is long enough."""
        return inf if self.left is None or self.right is None else self.left + self.right + 1

    @property
    def packed(self) -> bool:
        """Where documents begin and end is part of the mask, and may be new in every batch."""
        return bool(self.documents)

    def interval(self, positions: Tensor, seq_length: int) -> tuple[Tensor, Tensor]:
        """The first key that each query at these positions sees, and the one after its last; int64 as the positions."""
        ends = torch.tensor(self.documents or (0, seq_length))
        after = torch.searchsorted(ends, positions, right=True)
        first, end = ends[after - 1], ends[after]
        if self.left is not None:
            first = torch.maximum(first, positions - self.left)
        if self.right is not None:
            end = torch.minimum(end, positions + self.right + 1)
        return first, end

    def pieces(self, segment: range) -> Iterator[tuple[int, range]]:
        """The part of a segment in each document: number of the document, and indices into the segment."""
        if not self.documents:
            yield 0, range(len(segment))
            return
        first = bisect_right(self.documents, segment[0]) - 1
        for number, (start, end) in enumerate(pairwise(self.documents[first:]), start=first):
            here = range(_steps_to(segment, start), min(len(segment), _steps_to(segment, end)))
            if here:
                yield number, here
            if end > segment[-1]:
                return


CAUSAL = Mask(right=0)


def document_bounds(cu_seqlens: Tensor | None, seq_length: int) -> tuple[int, ...]:
    """``Mask.documents`` from cumulative lengths; copies them to the CPU once. Empty documents are left out.

    Raises:
        ValueError: if they do not run from 0 to the length of the whole sequence in increasing order.
    """
    if cu_seqlens is None:
        return ()
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [documents + 1], got {cu_seqlens.dtype} {cu_seqlens.shape}"
        )
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != seq_length or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must increase from 0 to the {seq_length} tokens of all ranks, got {bounds}")
    return tuple(dict.fromkeys(bounds))


def _steps_to(segment: range, position: int) -> int:
    """How many positions of the segment lie before this one."""
    return max(0, -(-(position - segment.start) // segment.step))
