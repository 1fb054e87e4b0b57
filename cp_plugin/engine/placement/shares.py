"""Search state of a placement: what each rank holds and its remaining room. See ``placement.filling``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from cp_plugin.engine.placement.pairs import Intervals, Ints, Pairs, traffic

Part = tuple[int, int, int]
"""Document, start, stop."""
SLACK = 30
"""Permitted excess of whole documents over the mean work, in thousandths."""


class Pack(NamedTuple):
    """The documents, and the mean share of a rank."""

    long: list[int]
    """Documents placed individually, longest first."""
    lengths: list[int]
    works: list[int]
    short: Ints
    """The other documents, longest first."""
    short_lengths: Ints
    tokens: int
    """Tokens of one rank."""
    mean: int
    """Mean work of one rank."""


class Style(NamedTuple):
    """How to cut documents that are too long for one rank. The best style depends on the pack."""

    even: bool
    """Equal shares of the work instead of filling one rank after another."""
    reserve: bool
    """Reserve work for the documents that will fill up a rank's tokens."""
    mirrored: bool
    """Take as much of the head as of the tail; otherwise only as far as needed."""
    reach: int
    """Eighths between the fewest keys that the longest document's last rank may need, and all of them."""


class Ranks:
    """What each rank holds, and its remaining room."""

    def __init__(self, size: int, tokens: int, work: int, pairs: Pairs) -> None:
        self.pairs = pairs
        self.mean = work
        self.tokens = [tokens] * size
        """Remaining tokens."""
        self.work = [work] * size
        """Work missing to the mean; negative above it."""
        self.need = [0] * size
        """Keys to receive."""
        self.held: list[dict[int, Intervals]] = [{} for _ in range(size)]
        self.last = np.empty((4, 0), np.int64)
        """Parts of the short documents: document, start, stop, rank."""

    def cut(self, document: int, length: int, shares: Mapping[int, int], style: Style, most: int) -> None:
        """Divide a document over ranks, the first of which holds its end.

        Args:
            shares: rank -> the work that it can take; more in total than the document has.
            most: keys that a rank should need at most, where its work permits.
        """
        pairs, head, tail, to_head, to_tail = self.pairs, 0, length, 0, self.pairs(length)
        share_left, room = sum(shares.values()), sum(self.tokens[rank] for rank in shares)
        for rank, share in shares.items():
            rest, todo = tail - head, to_tail - to_head
            if not rest:
                return
            room -= self.tokens[rank]
            work = todo
            if share_left:
                work = todo * share // share_left if style.even else min(todo, share + self.mean * SLACK // 1000)
            share_left -= share
            n = max(tail - pairs.tokens(to_tail - work), tail - max(0, most - self.need[rank]))
            if style.mirrored:
                n = max(n, rest * work // todo)
            n = min(n, pairs.tokens(to_head + work) - head)  # taking all from the head is the least work
            n = min(max(n, rest - room), self.tokens[rank], rest)
            if not n:
                continue
            x = n if n == rest else pairs.heads(head, tail, n, work)
            for start, stop in [(head, tail)] if n == rest else [(head, head + x), (tail - n + x, tail)]:
                if start < stop:
                    self.hold(rank, (document, start, stop))
            head, tail = head + x, tail - n + x
            to_head, to_tail = pairs(head), pairs(tail)

    def hold(self, rank: int, part: Part) -> None:
        """Add part of a document to what a rank holds."""
        self._change(rank, part, _add, 1)

    def swap(self, a: int, b: int, of_a: Part, of_b: Part) -> None:
        for rank, lost, gained in ((a, of_a, of_b), (b, of_b, of_a)):
            self._change(rank, gained, _add, 1)
            self._change(rank, lost, _remove, -1)

    def _change(self, rank: int, part: Part, change: Callable[[Intervals, int, int], Intervals], sign: int) -> None:
        document, start, stop = part
        held = self.held[rank]
        before = held.get(document, [])
        after = held[document] = change(before, start, stop)
        self.tokens[rank] -= sign * (stop - start)
        self.work[rank] -= sign * (self.pairs(stop) - self.pairs(start))
        self.need[rank] += self.pairs.missing(after) - self.pairs.missing(before)
        if not after:
            del held[document]

    def share(self, rank: int, density: int, reserve: int) -> int:
        """Work that a rank can take from a document while keeping enough for the documents that fill it up.

        Args:
            density: work per token of the document.
            reserve: work to keep per token of remaining room.
        """
        if density <= reserve:
            return max(0, self.work[rank])
        return max(0, (self.work[rank] - reserve * self.tokens[rank]) * density // (density - reserve))

    def fill_up(self, documents: Ints, lengths: Ints) -> None:
        """Fill the remaining room with the short documents, one after another.

        A golden-ratio permutation makes every run of them representative of all.
        """
        if not len(documents):
            return
        mixed = np.argsort(np.arange(len(documents)) * 2654435769 & 0xFFFFFFFF, kind="stable")
        documents, lengths = documents[mixed], lengths[mixed]
        ends, rooms = np.cumsum(lengths), np.cumsum(self.tokens)
        stops = np.union1d(ends, rooms[rooms > 0])
        starts = np.concatenate([[0], stops[:-1]])
        which, rank = np.searchsorted(ends, stops), np.searchsorted(rooms, stops)
        before = (ends - lengths)[which]
        self.last = np.stack([documents[which], starts - before, stops - before, rank])
        work = np.array(self.work)
        np.subtract.at(work, rank, self.pairs.many(stops - before) - self.pairs.many(starts - before))
        self.work, self.tokens = work.tolist(), [0] * len(work)

    def excess(self, limit: int) -> int:
        """Work of the busiest rank beyond ``limit`` above the mean."""
        return max(0, -min(self.work) - limit)

    def traffic(self) -> Ints:
        """Keys sent between ranks: ``[receiver, sender]``."""
        return traffic(*self.parts(), self.pairs.left, len(self.work))

    def parts(self) -> Ints:
        """All parts: document, start, stop, rank; ``[4, parts]``."""
        held = [
            (d, start, stop, r) for r, of in enumerate(self.held) for d, parts in of.items() for start, stop in parts
        ]
        return np.concatenate([np.array(held, np.int64).reshape(-1, 4).T, self.last], 1)


def _remove(parts: Intervals, start: int, stop: int) -> Intervals:
    cut = ((a, b) for c, d in parts for a, b in ((c, min(d, start)), (max(c, stop), d)))
    return [(a, b) for a, b in cut if a < b]


def _add(parts: Intervals, start: int, stop: int) -> Intervals:
    joined: Intervals = []
    for a, b in sorted([*parts, (start, stop)]):
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined
