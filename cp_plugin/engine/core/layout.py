"""Token layouts: the global positions that each context-parallel rank holds.

A shard is a concatenation of *affine segments*, Python ``range`` objects. Eight tokens on two ranks:

    contiguous   rank 0: 0 1 2 3       rank 1: 4 5 6 7        one segment, step 1
    zigzag       rank 0: 0 1 . 6 7     rank 1: 2 3 . 4 5      a chunk and its mirror image, step 1
    striped      rank 0: 0 2 4 6       rank 1: 1 3 5 7        one segment, step = number of ranks

Sources: contiguous, Ring Attention (arXiv 2310.01889); zigzag, Megatron-Core and Llama 3; striped, Striped Attention
(arXiv 2311.09431, section 3).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_plugin.engine.common.recent import Recent

Segments = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A partition of positions ``0 .. seq_length - 1`` over ``size`` ranks, ``seq_length / size`` each."""

    name: str
    chunks: Callable[[int], int]
    """``size -> n``: the sequence length must be a multiple of n."""
    place: Callable[[int, int, int], Segments]
    """``(seq_length, size, index) -> segments`` for two or more ranks and a valid length."""
    cyclic: bool = False
    """Whether neighbouring tokens are on neighbouring ranks."""

    def divisor(self, size: int) -> int:
        """The number that must divide the sequence length."""
        return self.chunks(size) if size > 1 else 1

    def padded(self, seq_length: int, size: int, parts: int = 1) -> int:
        """The shortest valid length >= ``seq_length`` whose shards split into ``parts`` equal parts."""
        divisor = self.divisor(size) * parts
        return math.ceil(seq_length / divisor) * divisor

    def segments(self, seq_length: int, size: int, index: int) -> Segments:
        """Segments of global positions on rank ``index``, in storage order; ValueError if the rank does not exist or
        the sequence length is invalid for this layout."""
        if not 0 <= index < size:
            raise ValueError(f"rank index {index} is outside 0..{size - 1}")
        divisor = self.divisor(size)
        if seq_length <= 0 or seq_length % divisor:
            legal = max(1, round(seq_length / divisor)) * divisor
            raise ValueError(
                f"sequence length {seq_length} cannot be split evenly across {size} context-parallel ranks in the "
                f"{self.name} layout: it must be a multiple of {divisor} (nearest: {legal})"
            )
        return join_adjacent(self.place(seq_length, size, index)) if size > 1 else (range(seq_length),)

    def positions(self, seq_length: int, size: int, index: int, device: torch.device | str = "cpu") -> Tensor:
        """Global positions of rank ``index``'s tokens: int64 ``[seq_length / size]``, created on the device."""
        segments = self.segments(seq_length, size, index)
        return torch.cat([torch.arange(s.start, s.stop, s.step, device=device) for s in segments])

    def shard(self, x: Tensor, dim: int, size: int, index: int) -> Tensor:
        """Rank ``index``'s shard of ``x`` along ``dim`` (the full sequence); differentiable.

        A contiguous copy, never a view of ``x``, unless there is only one rank.
        """
        if size == 1:
            return x
        before = (slice(None),) * (dim % x.dim())
        parts = [x[(*before, as_slice(s))] for s in self.segments(x.size(dim), size, index)]
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """The inverse of ``shard``: the full tensor from all shards in rank order; differentiable."""
        size = len(shards)
        if size == 1:
            return shards[0]
        joined = torch.cat(tuple(shards), dim)
        held = [self.positions(joined.size(dim), size, index, joined.device) for index in range(size)]
        return joined.index_select(dim, torch.cat(held).argsort())


def join_adjacent(segments: Sequence[range]) -> Segments:
    """Join neighbouring segments that continue each other with the same step."""
    joined: list[range] = []
    for s in segments:
        last = joined[-1] if joined else None
        if last is not None and last.step == s.step and last[-1] + s.step == s[0]:
            joined[-1] = range(last.start, s.stop, s.step)
        else:
            joined.append(s)
    return tuple(joined)


KEPT_BYTES = 2**28
"""Cache limit for index tensors kept on devices; the order of a million tokens has 8 MB."""


def sort_positions(segments: Segments, device: torch.device) -> tuple[Segments, Tensor | None]:
    """The positions in increasing order and ``order`` with ``sorted[i] = stored[order[i]]``.

    Gathered shards are interleaved runs; sorting them yields few long runs, hence few large tiles. The order stays on
    the device; it is None where sorting does not reduce the number of segments.
    """
    if len(segments) == 1:
        return segments, None
    return _orders.get((segments, device), lambda: _sorted(segments, device))


def _nbytes(entry: tuple[Segments, Tensor | None]) -> int:
    return 64 * len(entry[0]) + (0 if entry[1] is None else entry[1].nbytes)


_orders: Recent[tuple[Segments, torch.device], tuple[Segments, Tensor | None]] = Recent(KEPT_BYTES, _nbytes)


def _sorted(segments: Segments, device: torch.device) -> tuple[Segments, Tensor | None]:
    by_start = sorted(range(len(segments)), key=lambda i: segments[i].start)
    in_order = [segments[i] for i in by_start]
    if all(len(a) > 1 and a[-1] < b.start for a, b in itertools.pairwise(in_order)):  # no interleaving, no sort
        joined = join_adjacent(in_order)
        if len(joined) == len(segments):
            return segments, None
        return joined, torch.cat(_rows(segments, by_start)).to(device)
    if (whole := _interleaved(in_order)) is not None:
        return (whole,), torch.stack(_rows(segments, by_start), 1).flatten().to(device)
    positions = torch.cat([torch.arange(s.start, s.stop, s.step) for s in segments])
    ordered, order = positions.sort()
    runs = _runs(ordered)
    return (runs, order.to(device)) if len(runs) < len(segments) else (segments, None)


def _rows(segments: Segments, order: Sequence[int]) -> list[Tensor]:
    """Storage rows of each segment, taken in the given order."""
    rows = torch.arange(sum(map(len, segments))).split([len(s) for s in segments])
    return [rows[i] for i in order]


def _interleaved(segments: Sequence[range]) -> range | None:
    """The single run formed by segments that each take every n-th of its positions, if they do."""
    first, last = segments[0], segments[-1]
    step, rest = divmod(first.step, len(segments))
    turns = (range(first.start + i * step, first.stop + i * step, first.step) for i in range(len(segments)))
    if rest or any(s.step != first.step or s != turn for s, turn in zip(segments, turns, strict=True)):
        return None
    return range(first.start, last[-1] + 1, step)


def _runs(ordered: Tensor) -> Segments:
    """Split increasing positions into maximal runs of constant step, left to right."""
    steps = ordered.diff()
    ends = (steps[1:] != steps[:-1]).nonzero().flatten().add(2).tolist()  # index one past the end of each run
    runs, start = [], 0
    for end in [*ends, len(ordered)]:
        if end > start + 1 or end == len(ordered) > start:  # the gap after a run is not a run
            first, last = int(ordered[start]), int(ordered[end - 1])
            step = (last - first) // (end - start - 1) if end - start > 1 else 1
            runs.append(range(first, last + 1, step))
            start = end
    return tuple(runs)


def as_slice(r: range) -> slice:
    """The slice that selects an increasing range."""
    return slice(r.start, r.stop, r.step)


def take(x: Tensor, r: range) -> Tensor:
    """Rows ``r`` of ``x``: a view, except for a decreasing range."""
    if r.step == 1 and len(r) == x.size(0):
        return x
    return x[as_slice(r)] if r.step > 0 else x[as_slice(r[::-1])].flip(0)


def _contiguous(seq_length: int, size: int, index: int) -> Segments:
    n = seq_length // size
    return (range(index * n, (index + 1) * n),)


def _zigzag(seq_length: int, size: int, index: int) -> Segments:
    n = seq_length // (2 * size)
    mirror = 2 * size - 1 - index
    return range(index * n, (index + 1) * n), range(mirror * n, (mirror + 1) * n)


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("contiguous", lambda size: size, _contiguous),
        Layout("zigzag", lambda size: 2 * size, _zigzag),
        Layout("striped", lambda size: size, lambda n, size, index: (range(index, n, size),), cyclic=True),
    )
}
"""Layouts defined for every sequence; ``engine.placement`` adds those built per pack."""
