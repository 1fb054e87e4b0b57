"""Needed keys: which key rows of each rank the queries of a rank see.

    rank 2's queries        document 0      document 1           rank 2 reads    rank 1: rows 5 .. 7
    in document 1        | 0: 0 1 2 3 4 5 6 7 | 1: 8 .. 15 | 2: 16 .. 23 |       and its own: rows 0 .. 7
                                       ^ begins at 13

Computed with a few integer tensor operations on the CPU; their length is the number of pieces (parts of a segment in
one document), never the sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Mask

_FAR = 2**40
"""Beyond any position: no limit."""


class Needs(NamedTuple):
    """Runs of visible key rows: int64 tensors of equal length, sorted by reader, owner and row.

    Runs of one (reader, owner) pair do not touch. Rows count from the owner's first key.
    """

    reader: Tensor
    """Rank whose queries see the run."""
    owner: Tensor
    """Rank that holds it."""
    start: Tensor
    stop: Tensor

    def rows(self, reader: int, owner: int) -> tuple[range, ...]:
        """The runs of one reader and owner."""
        chosen = (self.reader == reader) & (self.owner == owner)
        return tuple(map(range, self.start[chosen].tolist(), self.stop[chosen].tolist()))

    def counts(self, ranks: int) -> Tensor:
        """Visible rows per reader and owner: int64 ``[ranks, ranks]``, readers first."""
        totals = torch.zeros(ranks * ranks, dtype=torch.int64)
        return totals.index_add_(0, self.reader * ranks + self.owner, self.stop - self.start).view(ranks, ranks)


def needs(queries: Sequence[Segments], keys: Sequence[Segments], mask: Mask) -> Needs:
    """The keys that the queries of every rank see.

    Args:
        queries, keys: positions of every rank's queries and keys, in storage order.
        mask: which positions see which.
    """
    held = _held(keys)
    pieces = _pieces(queries, mask, tuple({int(step) for step in held.step}))
    i, j = _pairs(pieces, held)
    piece, segment = _Pieces(*(x[i] for x in pieces)), _Held(*(x[j] for x in held))
    start = _steps(piece.low - segment.first, segment.step).clamp(min=0)
    stop = torch.minimum(_steps(piece.high - segment.first, segment.step), segment.length)
    seen = start < stop
    if mask.width < inf:
        seen &= _sees_in_step(piece, segment, mask)
    runs = (piece.reader, segment.owner, segment.row + start, segment.row + stop)
    at = seen.nonzero(as_tuple=True)
    return _joined(*(x.expand(seen.shape)[at] for x in runs))


def rows_of(segments: Segments, rows: Sequence[range]) -> Segments:
    """Positions of the given rows of a shard, in that order."""
    positions: list[range] = []
    for wanted in rows:
        offset = 0
        for segment in segments:
            part = segment[max(0, wanted.start - offset) : max(0, wanted.stop - offset)]
            if part:
                positions.append(part)
            offset += len(segment)
    return tuple(positions)


class _Pieces(NamedTuple):
    """Queries of one segment in one document."""

    reader: Tensor
    first: Tensor
    """Position of the first query."""
    step: Tensor
    low: Tensor
    """The first position that any of them sees."""
    high: Tensor
    """One past the last position that any of them sees."""


class _Held(NamedTuple):
    """Segments of keys."""

    owner: Tensor
    first: Tensor
    step: Tensor
    length: Tensor
    row: Tensor
    """Storage row of the first key."""


def _held(keys: Sequence[Segments]) -> _Held:
    entries = []
    for owner, segments in enumerate(keys):
        row = 0
        for s in segments:
            entries.append((owner, s.start, s.step, len(s), row))
            row += len(s)
    return _Held(*torch.tensor(entries, dtype=torch.int64).view(-1, 5).T.contiguous())


def _pieces(queries: Sequence[Segments], mask: Mask, steps: tuple[int, ...]) -> _Pieces:
    """steps: of the segments of keys."""
    pieces = []
    for reader, segments in enumerate(queries):
        for segment in segments:
            if mask.stops:
                pieces += [(reader, segment[0], segment.step, *run) for run in _seen_in_tree(segment, mask)]
                continue
            for document, rows in mask.pieces(segment):
                begins, ends = mask.documents[document : document + 2] if mask.documents else (0, _FAR)
                positions = segment[rows.start : rows.stop]
                whole = mask.width >= positions.step or steps == (positions.step,)
                for part in (positions,) if whole else (range(p, p + 1) for p in positions):
                    low = begins if mask.left is None else max(begins, part[0] - mask.left)
                    high = ends if mask.right is None else min(ends, part[-1] + mask.right + 1)
                    pieces.append((reader, part[0], part.step, low, high))
    return _Pieces(*torch.tensor(pieces, dtype=torch.int64).view(-1, 5).T.contiguous())


def _seen_in_tree(segment: range, mask: Mask) -> list[tuple[int, int]]:
    """Runs of keys that a segment of queries sees: in each visible document, up to the last query."""
    begins, ends = torch.tensor(mask.documents).unfold(0, 2, 1).T
    stops = torch.tensor(mask.stops)
    last = segment.start + (_steps(stops - segment.start, torch.tensor(segment.step)) - 1) * segment.step
    last = last.clamp(max=segment[-1])
    seen = (last >= begins) & (stops > segment.start)
    return list(zip(*(x.tolist() for x in _merged(begins[seen], torch.minimum(ends, last + 1)[seen])), strict=True))


def _pairs(pieces: _Pieces, held: _Held) -> tuple[Tensor, Tensor]:
    """Indices of the pieces and segments that may meet, found by binary search where all steps are 1.

    Otherwise all pairs, as ``[pieces, 1]`` and ``[1, segments]``, which broadcast.
    """
    if (held.step > 1).any():
        return torch.arange(len(pieces.low))[:, None], torch.arange(len(held.first))[None]
    order = held.first.argsort()
    first, stop = held.first[order], (held.first + held.length)[order]
    begin = torch.searchsorted(stop, pieces.low, right=True)
    count = (torch.searchsorted(first, pieces.high) - begin).clamp(min=0)
    i = torch.repeat_interleave(count)
    within = torch.arange(len(i)) - (count.cumsum(0) - count)[i]
    return i, order[begin[i] + within]


def _steps(apart: Tensor, step: Tensor) -> Tensor:
    """The first index of a segment at that distance from its start."""
    return -torch.div(-apart, step, rounding_mode="floor")


def _sees_in_step(piece: _Pieces, segment: _Held, mask: Mask) -> Tensor:
    """Return True if a query sees any key of a segment of the same step, for windows narrower than the step.

    Query m sees key j if ``first <= m - j <= last``: if such a difference exists, all keys between the ends of the
    windows are seen, otherwise none.
    """
    apart = segment.first - piece.first
    first = _steps(apart - (_FAR if mask.right is None else mask.right), piece.step)
    last = torch.div(apart + (_FAR if mask.left is None else mask.left), piece.step, rounding_mode="floor")
    return first <= last


def _joined(reader: Tensor, owner: Tensor, start: Tensor, stop: Tensor) -> Needs:
    """Join runs that overlap or touch."""
    if not len(reader):
        return Needs(reader, owner, start, stop)
    line, ranks = int(stop.max()) + 1, int(owner.max()) + 1  # keeps runs of different pairs apart
    offset = (reader * ranks + owner) * line
    order = (offset + start).argsort()
    starts, stops = _merged((offset + start)[order], (offset + stop)[order])
    pair = torch.div(starts, line, rounding_mode="floor")
    reader, owner = torch.div(pair, ranks, rounding_mode="floor"), pair % ranks
    return Needs(reader, owner, starts - pair * line, stops - pair * line)


def _merged(starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """Join overlapping or touching runs (one or more, sorted by start)."""
    reach = stops.cummax(0).values
    begins = torch.cat([torch.ones(1, dtype=torch.bool), starts[1:] > reach[:-1]])
    ends = torch.cat([begins[1:], torch.ones(1, dtype=torch.bool)])
    return starts[begins], reach[ends]
