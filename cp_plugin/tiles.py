"""Tiles: which keys each query of a block sees, reduced to one integer per tile.

Take two segments of equal step s, queries ``a + m*s`` and keys ``b + j*s``. Under a causal mask query m sees key j iff

    b + j*s <= a + m*s    iff    j <= m + floor((a - b) / s)

so all there is to know is one integer, the tile's **diagonal** d: row m sees the keys 0 .. m + d.

    d = 0   causal         d < 0   strictly causal, staggered     d >= keys - 1   full        d <= -queries   empty
    # . . .                . . . .                                # # # #
    # # . .                # . . .                                # # # #
    # # # .                # # . .                                # # # #

Segments of different steps are first split into parts of a common step. Every layout, and every row or column of a 2D
grid of ranks, reduces to such tiles; there is no test on ranks anywhere else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from cp_plugin.layout import Segments


class Tile(NamedTuple):
    """Local query rows and key rows (indices into the two shards), and the diagonal between them."""

    q: range
    k: range
    diagonal: int

    @property
    def full(self) -> bool:
        """Every query sees every key."""
        return self.diagonal >= len(self.k) - 1

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs: the tile's work."""
        rows, keys = len(self.q), len(self.k)
        first = max(0, -self.diagonal)  # first row that sees anything
        ramp_end = min(rows, max(first, keys - 1 - self.diagonal))  # first row that sees every key
        ramp = ramp_end - first
        return ramp * (self.diagonal + 1) + (first + ramp_end - 1) * ramp // 2 + (rows - ramp_end) * keys

    def cut(self) -> tuple[Tile, ...]:
        """The same pairs as full tiles and square causal tiles (diagonal 0), for kernels that know only those two.

        Needs a trimmed tile, as ``tiles`` gives them. Parts share query rows where a part of the keys is seen by all.
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
def tiles(q_segments: Segments, k_segments: Segments, causal: bool) -> tuple[Tile, ...]:
    """The non-empty tiles between a query shard and a key shard, each trimmed of rows and keys that see nothing.

    Args:
        q_segments, k_segments: global positions of the two shards, in storage order.
        causal: a query sees the keys at positions up to its own; otherwise it sees all.
    """
    rows, keys = sum(map(len, q_segments)), sum(map(len, k_segments))
    if not causal:
        return (Tile(range(rows), range(keys), keys - 1),)
    if q_segments == k_segments and _increasing(q_segments):
        return (Tile(range(rows), range(keys), 0),)  # order within the shard is order within the sequence
    found = []
    for q, q_rows in _with_rows(q_segments):
        for k, k_rows in _with_rows(k_segments):
            step = lcm(q.step, k.step)
            for i in range(step // q.step):
                for j in range(step // k.step):
                    a, b = q[i :: step // q.step], k[j :: step // k.step]
                    if a and b:
                        tile = Tile(
                            q_rows[i :: step // q.step], k_rows[j :: step // k.step], (a.start - b.start) // step
                        )
                        found.extend(_trim(tile))
    return tuple(_join_full(found))


def _with_rows(segments: Segments) -> Iterator[tuple[range, range]]:
    offset = 0
    for s in segments:
        yield s, range(offset, offset + len(s))
        offset += len(s)


def _increasing(segments: Segments) -> bool:
    return all(a[-1] < b[0] for a, b in itertools.pairwise(segments))


def _trim(tile: Tile) -> Iterator[Tile]:
    """Drop leading rows that see no key and trailing keys that no row sees."""
    blind = max(0, -tile.diagonal)
    q, diagonal = tile.q[blind:], tile.diagonal + blind
    if q:
        k = tile.k[: len(q) + diagonal]
        yield Tile(q, k, min(diagonal, len(k) - 1))


def _join_full(found: Sequence[Tile]) -> list[Tile]:
    """Join full tiles that lie side by side: the same keys under adjacent rows, or the same rows over adjacent keys."""
    joined: list[Tile] = []
    for tile in found:
        while joined and (whole := _side_by_side(joined[-1], tile)) is not None:
            joined.pop()
            tile = whole
        joined.append(tile)
    return joined


def _side_by_side(a: Tile, b: Tile) -> Tile | None:
    if not (a.full and b.full):
        return None
    if a.q == b.q and (k := _continued(a.k, b.k)) is not None:
        return Tile(a.q, k, len(k) - 1)
    if a.k == b.k and (q := _continued(a.q, b.q)) is not None:
        return Tile(q, a.k, len(a.k) - 1)
    return None


def _continued(a: range, b: range) -> range | None:
    return range(a.start, b.stop, a.step) if a.step == b.step and a[-1] + a.step == b[0] else None
