"""Cost of document parts under a causal mask: (query, key) pairs and keys from other ranks, in integers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_FAR = 2**40
"""More tokens than a document has."""
Intervals = list[tuple[int, int]]
"""Parts (start, stop) of one document on one rank: increasing, not touching."""


class Pairs:
    """Causal work: the keys seen by the first tokens of a document."""

    def __init__(self, left: int | None) -> None:
        """left: earlier tokens that a token sees; None: all of its document."""
        self.left = left
        self.seen = _FAR if left is None else left + 1

    def __call__(self, tokens: int) -> int:
        seen = min(tokens, self.seen)
        return seen * (seen + 1) // 2 + (tokens - seen) * self.seen

    def many(self, tokens: Ints) -> Ints:
        """Vectorised ``__call__``."""
        seen = np.minimum(tokens, self.seen)
        return seen * (seen + 1) // 2 + (tokens - seen) * self.seen

    def tokens(self, pairs: int) -> int:
        """The most tokens that see at most so many keys in total."""
        full = self(self.seen)
        return (isqrt(8 * pairs + 1) - 1) // 2 if pairs <= full else self.seen + (pairs - full) // self.seen

    def count(self, parts: Iterable[tuple[int, int]]) -> int:
        """Work of these parts of one document."""
        return sum(self(stop) - self(start) for start, stop in parts)

    def missing(self, parts: Intervals) -> int:
        """Keys that these parts of a document see and do not contain."""
        total = end = 0
        for start, stop in parts:
            total += start - max(start + 1 - self.seen, end) if start > end else 0
            end = stop
        return total

    def heads(self, start: int, stop: int, tokens: int, work: int) -> int:
        """Return how many of ``tokens`` to take from the start (the rest from the stop) for this much work."""
        if self.left is None:  # linear in the answer: the squares cancel
            apart = stop - start - tokens
            most = tokens * (2 * stop - tokens + 1) // 2
            return max(0, min(tokens, (most - work) // apart)) if apart > 0 else tokens
        return bisect_left(
            range(tokens), True, key=lambda x: self.count([(start, start + x), (stop - tokens + x, stop)]) <= work
        )

    def moved(self, stop: int, start: int, tokens: int) -> int:
        """Work of the last tokens before ``stop`` minus that of the first ones from ``start``."""
        return self(stop) - self(stop - tokens) - self(start + tokens) + self(start)

    def exchanged(self, stop: int, start: int, most: int, work: int) -> int:
        """The fewest tokens (at most ``most``) for which ``moved`` is about ``work``; 0 if none."""
        apart = stop - start
        longest = min(most, apart // 2)
        if longest <= 0:
            return 0
        if self.left is None:  # moved is n (apart - n)
            square = apart * apart - 4 * work
            return min(longest, (apart - isqrt(square)) // 2) if square > 0 else longest
        return bisect_left(range(longest), True, key=lambda n: self.moved(stop, start, n) >= work)


def traffic(document: Ints, start: Ints, stop: Ints, rank: Ints, left: int | None, size: int) -> Ints:
    """Keys sent between ranks, each once: ``[receiver, sender]``.

    document, start, stop, rank: of each piece; a piece needs the keys before it that its rank does not hold.
    """
    by_rank = np.lexsort((start, document, rank))
    d, end, r = document[by_rank], start[by_rank], rank[by_rank]
    same = np.zeros(len(d), bool)
    same[1:] = (d[1:] == d[:-1]) & (r[1:] == r[:-1])
    held = np.where(same, np.concatenate([[0], stop[by_rank][:-1]]), 0)
    begin = held if left is None else np.maximum(held, end - left)
    gaps = np.flatnonzero(begin < end)
    d, begin, end, r = d[gaps], begin[gaps], end[gaps], r[gaps]

    line = np.lexsort((start, document))  # all pieces in document order, without gaps
    width = int(stop.max()) + 1
    at = (document * width + start)[line]
    first = np.searchsorted(at, d * width + begin, side="right") - 1
    after = np.searchsorted(at, d * width + end)
    count = after - first
    gap = np.repeat(np.arange(len(gaps)), count)
    piece = line[np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)]
    keys = np.minimum(stop[piece], end[gap]) - np.maximum(start[piece], begin[gap])
    table = np.zeros((size, size), np.int64)
    np.add.at(table, (r[gap], rank[piece]), keys)
    return table


def busy(traffic: Ints) -> list[int]:
    """Keys received or sent by each rank, whichever is more (links are full duplex). traffic: from ``traffic``."""
    return np.maximum(traffic.sum(0), traffic.sum(1)).tolist()
