"""Tiles: a causal block reduced to one integer per pair of segments.

Take two segments of equal step s, queries ``a + m*s`` and keys ``b + j*s``. Under a causal mask query m sees key j iff

    b + j*s <= a + m*s    iff    j <= m + floor((a - b) / s)

so the tile is described by its **diagonal** d: row m sees the keys 0 .. m + d.

    d = 0   causal         d < 0   strictly causal, staggered     d >= keys - 1   full        d <= -queries   empty
    # . . .                . . . .                                # # # #
    # # . .                # . . .                                # # # #
    # # # .                # # . .                                # # # #

A sliding window adds a lower diagonal l: row m sees the keys m + l .. m + d. Such a band is cut into tiles with a
single diagonal; tiles with a lower one become upper-diagonal by reversing rows and keys:

    # # . . .        # #|. . .       # # . .   reversed:
    # # # . .   =    # #|# . .       # # . .    # . . .
    . # # # .        . #|# # .       . # . .    # # . .

Segments of different steps are first split to a common step, and all segments at document bounds. In a tree the keys of
a document meet all queries up to the end of its subtree. Every layout, mask and row or column of a 2D rank grid reduces
to such tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from cp_plugin.engine.core.layout import Segments, join_adjacent
from cp_plugin.engine.core.mask import Mask, steps_to


class Tile(NamedTuple):
    """Rows of the query and key shards and the diagonal between them. Both ranges may be decreasing."""

    q: range
    k: range
    diagonal: int

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.diagonal >= len(self.k) - 1

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs."""
        rows, keys = len(self.q), len(self.k)
        first = max(0, -self.diagonal)  # first row that sees anything
        ramp_end = min(rows, max(first, keys - 1 - self.diagonal))  # first row that sees every key
        ramp = ramp_end - first
        return ramp * (self.diagonal + 1) + (first + ramp_end - 1) * ramp // 2 + (rows - ramp_end) * keys

    def cut(self) -> tuple[Tile, ...]:
        """The same pairs as full tiles and square causal tiles (diagonal 0), for kernels that support only those.

        Requires a trimmed tile, as returned by ``tiles``. Parts may share query rows.
        """
        if self.full:
            return (self,)
        parts = []
        if self.diagonal > 0:  # the first d keys are seen by every row
            parts.append(Tile(self.q, self.k[: self.diagonal], self.diagonal - 1))
        keys = self.k[self.diagonal :]
        parts.append(Tile(self.q[: len(keys)], keys, 0))
        if len(self.q) > len(keys):  # the rows below the ramp see every key
            parts.append(Tile(self.q[len(keys) :], keys, len(keys) - 1))
        return tuple(parts)


@lru_cache(maxsize=4096)
def tiles(q_segments: Segments, k_segments: Segments, mask: Mask) -> tuple[Tile, ...]:
    """The non-empty tiles between a query and a key shard, trimmed of rows and keys that see nothing.

    Args:
        q_segments, k_segments: global positions of the two shards, in storage order.
        mask: which positions see which.
    """
    return tuple(_join_full(_make_tiles(q_segments, k_segments, mask)))


@lru_cache(maxsize=4096)
def square_tiles(q_segments: Segments, k_segments: Segments, mask: Mask) -> tuple[Tile, ...]:
    """``tiles``, each cut (``Tile.cut``)."""
    return tuple(part for tile in tiles(q_segments, k_segments, mask) for part in tile.cut())


def tiles_up_to(most: int, q_segments: Segments, k_segments: Segments, mask: Mask) -> tuple[Tile, ...] | None:
    """``tiles``, or None as soon as more than ``most`` are found (before joining)."""
    few = tuple(itertools.islice(_make_tiles(q_segments, k_segments, mask), most + 1))
    return tuple(_join_full(few)) if len(few) <= most else None


def may_meet(q_segments: Segments, k_segments: Segments, mask: Mask) -> bool:
    """Return True if any query may see any key, judged by segment ends; ignores documents."""

    def meet(q: range, k: range) -> bool:
        before = mask.left is None or k[-1] >= q[0] - mask.left
        return before and (mask.right is None or k[0] <= q[-1] + mask.right)

    return any(meet(q, k) for q in q_segments for k in k_segments)


def _make_tiles(q_segments: Segments, k_segments: Segments, mask: Mask) -> Iterator[Tile]:
    """The tiles before adjacent ones are joined."""
    if mask.full:
        rows, keys = sum(map(len, q_segments)), sum(map(len, k_segments))
        yield Tile(range(rows), range(keys), keys - 1)
        return
    if q_segments == k_segments and mask.left is None and mask.right == 0 and _increasing(q_segments):
        yield from _causal_tiles(q_segments, mask)  # order within the shard is order within the sequence
        return
    if mask.stops:
        yield from _below(q_segments, k_segments, mask)
        return
    causal = mask.left is None and mask.right == 0
    keys_of: dict[int, list[tuple[int, int, _Part]]] = {}
    for k in _parts(k_segments, mask):
        keys_of.setdefault(k.document, []).append((k.positions[0], k.positions[-1], k))
    for q in _parts(q_segments, mask):
        first, last, rows = q.positions[0], q.positions[-1], q.rows
        for start, end, k in keys_of.get(q.document, ()):
            if causal and start > last:  # shortcuts: there may be a million pairs
                continue
            if causal and end <= first:
                yield Tile(rows, k.rows, len(k.rows) - 1)
            else:
                yield from _tiles_between(q, k, mask)


class _Part(NamedTuple):
    """Tokens of one document in one segment: positions in the sequence, rows in the shard."""

    document: int
    positions: range
    rows: range


def _parts(segments: Segments, mask: Mask) -> Iterator[_Part]:
    for positions, rows in _with_rows(segments):
        for document, part in mask.pieces(positions) if positions else ():
            yield _Part(document, positions[part.start : part.stop], rows[part.start : part.stop])


def _causal_tiles(segments: Segments, mask: Mask) -> Iterator[Tile]:
    """The causal tiles of a shard with itself, one per document."""
    for document, parts in itertools.groupby(_parts(segments, mask), key=lambda part: part.document):
        of_document = [part.rows for part in parts]
        rows = range(of_document[0].start, of_document[-1].stop)
        stop = sum(len(s[: steps_to(s, mask.stops[document])]) for s in segments) if mask.stops else rows.stop
        yield Tile(range(rows.start, stop), rows, 0)


def _below(q_segments: Segments, k_segments: Segments, mask: Mask) -> Iterator[Tile]:
    """The tiles of a tree: the keys of a document and the queries before the end of its subtree."""
    for k in _parts(k_segments, mask):
        for positions, rows in _with_rows(q_segments):
            before = steps_to(positions, mask.stops[k.document])
            yield from _tiles_between(_Part(k.document, positions[:before], rows[:before]), k, mask)


def _tiles_between(q: _Part, k: _Part, mask: Mask) -> Iterator[Tile]:
    step = lcm(q.positions.step, k.positions.step)
    q_every, k_every = step // q.positions.step, step // k.positions.step
    for i in range(min(q_every, len(q.rows))):
        for j in range(min(k_every, len(k.rows))):
            apart = q.positions[i] - k.positions[j]
            diagonal = None if mask.right is None else (apart + mask.right) // step
            lowest = None if mask.left is None else -((mask.left - apart) // step)
            yield from _band(q.rows[i::q_every], k.rows[j::k_every], diagonal, lowest)


def _with_rows(segments: Segments) -> Iterator[tuple[range, range]]:
    offset = 0
    for s in segments:
        yield s, range(offset, offset + len(s))
        offset += len(s)


def _increasing(segments: Segments) -> bool:
    return all(a[-1] < b[0] for a, b in itertools.pairwise(segments))


def _band(q: range, k: range, diagonal: int | None, lowest: int | None) -> Iterator[Tile]:
    """Tiles of the band where row m sees the keys m + lowest .. m + diagonal; None: unbounded on that side."""
    while q and k:
        upper = len(k) - 1 if diagonal is None else diagonal
        lower = 1 - len(q) if lowest is None else lowest
        if upper < lower:
            return
        blind = max(0, -upper)  # rows before the first that sees a key
        q, upper, lower = q[blind : max(0, len(k) - lower)], upper + blind, lower + blind
        skipped = max(0, lower)  # keys before the first that is seen
        k, upper, lower = k[skipped : max(0, len(q) + upper)], upper - skipped, lower - skipped
        if not q or not k:
            return
        if lower <= 1 - len(q):
            yield Tile(q, k, min(upper, len(k) - 1))
            return
        if upper >= len(k) - 1:
            yield Tile(q[::-1], k[::-1], len(k) - len(q) - lower)
            return
        rows = upper - lower + 1  # rows whose keys are bounded on one side only
        yield from _band(q[:rows], k[: upper + 1], None, lower)
        yield from _band(q[:rows], k[upper + 1 :], -1, None)
        q, diagonal, lowest = q[rows:], upper + rows, lower + rows


def _join_full(unjoined: Iterable[Tile]) -> list[Tile]:
    """Join adjacent full tiles: same keys and adjacent rows, or same rows and adjacent keys."""
    joined: list[Tile] = []
    for tile in unjoined:
        while joined and (whole := _side_by_side(joined[-1], tile)) is not None:
            joined.pop()
            tile = whole
        joined.append(tile)
    return joined


def _side_by_side(a: Tile, b: Tile) -> Tile | None:
    if not (a.full and b.full):
        return None
    if a.q == b.q and len(k := join_adjacent((a.k, b.k))) == 1:
        return Tile(a.q, k[0], len(k[0]) - 1)
    if a.k == b.k and len(q := join_adjacent((a.q, b.q))) == 1:
        return Tile(q[0], a.k, len(a.k) - 1)
    return None
