"""Attention masks by global position: causal, full, sliding window, packed documents, trees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, MutableMapping
from itertools import pairwise
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Window = tuple[int, int]
"""Tokens visible before and after each token, -1: all; as in flash-attn and Transformer Engine."""


class Mask(NamedTuple):
    """A query at position p sees the keys at ``p - left .. p + right`` of its own document.

    In a tree, documents continue each other (``engine.core.tree``): a key is visible to the queries from its own
    position up to its document's stop. Trees are causal and have no window.
    """

    left: int | None = None
    """None: unlimited."""
    right: int | None = None
    """None: unlimited; 0: causal."""
    documents: tuple[int, ...] = ()
    """Start of each document, then the sequence length; empty: one document."""
    stops: tuple[int, ...] = ()
    """End of the subtree of each document; empty: not a tree."""

    @classmethod
    def from_arguments(cls, causal: bool, window: Window | None = None, documents: tuple[int, ...] = ()) -> Mask:
        """Make a mask from public arguments. A causal mask hides everything after a token, whatever the window."""
        left, right = (None if n == -1 else n for n in window or (-1, -1))
        return cls(left, 0 if causal else right, documents)

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.left is None and self.right is None and not self.documents

    @property
    def width(self) -> float:
        """Positions visible to a query in a sufficiently long document."""
        return inf if self.left is None or self.right is None else self.left + self.right + 1

    def interval(self, positions: Tensor, seq_length: int) -> tuple[Tensor, Tensor]:
        """First visible key of each query and one past the last; int64. Not defined for trees."""
        assert not self.stops
        ends = torch.tensor(self.documents or (0, seq_length))
        after = torch.searchsorted(ends, positions, right=True)
        first, end = ends[after - 1], ends[after]
        if self.left is not None:
            first = torch.maximum(first, positions - self.left)
        if self.right is not None:
            end = torch.minimum(end, positions + self.right + 1)
        return first, end

    def pieces(self, segment: range) -> Iterator[tuple[int, range]]:
        """Split a segment by document: document number, and indices into the segment."""
        if not self.documents:
            yield 0, range(len(segment))
            return
        first = bisect_right(self.documents, segment[0]) - 1
        for number, (start, end) in enumerate(pairwise(self.documents[first:]), start=first):
            rows = range(steps_to(segment, start), min(len(segment), steps_to(segment, end)))
            if rows:
                yield number, rows
            if end > segment[-1]:
                return

    def levels(self) -> list[tuple[list[int], Mask]]:
        """Split a tree by depth into packed-document masks: the document numbers of each level, and its mask.

        A subtree counts as part of the document it continues.
        """
        levels: list[tuple[list[int], list[int]]] = []
        path: list[int] = []  # ends of the enclosing subtrees
        for number, (begin, stop) in enumerate(zip(self.documents, self.stops, strict=False)):
            while path and path[-1] <= begin:
                path.pop()
            if len(path) == len(levels):
                levels.append(([], [0]))
            numbers, bounds = levels[len(path)]
            numbers.append(number)
            bounds += (begin, stop)
            path.append(stop)
        end = self.documents[-1]
        return [(n, self._replace(documents=tuple(dict.fromkeys((*b, end))), stops=())) for n, b in levels]


CAUSAL = Mask(right=0)


def document_bounds(cu_seqlens: Tensor | None, seq_length: int | None) -> tuple[int, ...]:
    """``Mask.documents`` from cumulative lengths, without empty documents.

    Bounds on a device are copied to the CPU when they are first seen, and again when they have changed in place.
    ValueError if they do not increase from 0 to the length of the whole sequence.

    seq_length: tokens of all ranks; None: whatever the bounds say.
    """
    if cu_seqlens is None:
        return ()
    if not isinstance(cu_seqlens, torch.Tensor):
        raise ValueError(f"cu_seqlens must be a tensor, int32 or int64 [documents + 1], got {cu_seqlens!r}")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [documents + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    bounds = numbers_in(cu_seqlens)
    end = bounds[-1] if bounds and seq_length is None else seq_length
    if not bounds or bounds[0] != 0 or bounds[-1] != end or any(a > b for a, b in pairwise(bounds)):
        tokens = "number of tokens" if end is None else f"{end} tokens"
        raise ValueError(f"cu_seqlens must increase from 0 to the {tokens} of all ranks, got {list(bounds)}")
    return tuple(dict.fromkeys(bounds))


def numbers_in(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Return the numbers of a tensor; those of one on a device are remembered: reading them makes the host wait."""
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():  # no version: changes would not be noticed
        return tuple(cu_seqlens.tolist())
    version, bounds = _READ.get(cu_seqlens, (None, ()))
    if version != cu_seqlens._version:
        bounds = tuple(cu_seqlens.tolist())
        _READ[cu_seqlens] = (cu_seqlens._version, bounds)
    return bounds


_READ: MutableMapping[Tensor, tuple[int, tuple[int, ...]]] = WeakIdKeyDictionary()
"""Device tensor -> its version, and its numbers."""


def steps_to(segment: range, position: int) -> int:
    """Number of positions of the segment before ``position``."""
    return max(0, -(-(position - segment.start) // segment.step))
