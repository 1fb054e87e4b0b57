"""Two ranks exchange equally many tokens: for balance, or so that the busiest receives and sends fewer keys.

See ``placement.filling``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cp_plugin.placement.pairs import Ints, busy
from cp_plugin.placement.shares import Part, Ranks

FEW = 4
"""Exchanges of two ranks that are looked at for balance."""
PROMISING = 4
"""Exchanges that are tried, of those that seem to leave the busiest rank least busy."""


class Exchange(NamedTuple):
    """Equally many tokens: what the first rank gives, and what the second does."""

    rank: int
    other: int
    given: Part
    taken: Part

    @property
    def back(self) -> Exchange:
        """Which undoes it."""
        return Exchange(self.rank, self.other, self.taken, self.given)


def balance(ranks: Ranks, limit: int) -> None:
    """Exchange tokens until no rank works more than ``limit`` above the mean, or nothing more is found."""
    work = ranks.work
    for _ in range(4 * len(work)):
        busiest = min(range(len(work)), key=work.__getitem__)
        over = -limit - work[busiest]
        if over <= 0:
            return
        for idle in sorted(range(len(work)), key=work.__getitem__, reverse=True)[:3]:
            most = work[idle] + limit
            if most > 0 and (found := _cheapest(ranks, busiest, idle, min(over, most * 3 // 4), most)):
                ranks.swap(busiest, idle, *found)
                break
        else:
            return


def _cheapest(ranks: Ranks, busy: int, idle: int, least: int, most: int) -> tuple[Part, Part] | None:
    """The end of a part of one rank's for the beginning of one of another's, equally long, that moves this work.

    Of the first few that are found, the one after which the two need the fewest keys.
    """
    pairs, wanted, best = ranks.pairs, (least + most) // 2, None
    mine, yours = ranks.held[busy], ranks.held[idle]
    theirs = [(start, stop, d) for d, parts in yours.items() for start, stop in parts]
    theirs.sort(key=lambda part: (part[0], -part[1], part[2]))
    found = 0
    for stop, start, document in sorted((b, a, d) for d, parts in mine.items() for a, b in parts):
        for begin, end, other in theirs:
            n = pairs.exchanged(stop, begin, min(stop - start, end - begin), wanted)
            if n and least <= pairs.moved(stop, begin, n) <= most:
                sent = ranks.need[idle] + (0 if document in yours else stop - n)
                cost = max(sent, ranks.need[busy] + (0 if other in mine else begin))
                if best is None or cost < best[0]:
                    best = cost, (document, stop - n, stop), (other, begin, begin + n)
                found += 1
                if found == FEW:
                    return best[1:]
    return best and best[1:]


def relieve(ranks: Ranks, limit: int, rounds: int, patience: int) -> int:
    """Exchange tokens so that the busiest rank receives and sends fewer keys.

    A tabu search. Exchanges of either end of the busiest rank's parts with those of others' are estimated, for a few
    lengths at once. Of the most promising ones the best is made, even where it is a step back, but none that leads to
    what was there before; and at the end, all that did not pay is undone. There must be no window.

    Args:
        rounds: exchanges that are made at most.
        patience: how many of them in a row may be ones that do not pay.

    Returns:
        The keys that the busiest rank receives or sends in the end.
    """
    traffic = ranks.traffic()
    best, seen = _busiest_first(traffic), {traffic.tobytes()}
    undo: list[Exchange] = []
    for _ in range(rounds):
        if len(undo) > patience:
            break
        tried: list[tuple[list[int], Exchange, Ints]] = []
        for exchange in _promising(ranks, traffic, limit):
            ranks.swap(*exchange)
            after = ranks.traffic()
            ranks.swap(*exchange.back)
            if after.tobytes() not in seen:
                tried.append((_busiest_first(after), exchange, after))
                if tried[-1][0] < best:
                    break
        if not tried:
            break
        now, exchange, traffic = min(tried, key=lambda one: one[0])
        seen.add(traffic.tobytes())
        ranks.swap(*exchange)
        undo.append(exchange.back)
        if now < best:
            best, undo = now, []
    for exchange in reversed(undo):
        ranks.swap(*exchange)
    return best[0]


def _busiest_first(traffic: Ints) -> list[int]:
    return sorted(busy(traffic), reverse=True)


def _promising(ranks: Ranks, traffic: Ints, limit: int) -> Iterator[Exchange]:
    """Of the busiest rank with another: what is estimated to leave both least busy, the best first.

    Of two parts of one document the estimate is rough. What would leave either a quarter busier than the busiest is
    left out.

    Arrays have the dimensions [length, part of the busiest rank and its end, part of another and its end].
    """
    received, sent = traffic.sum(1), traffic.sum(0)
    rank = int(np.maximum(received, sent).argmax())
    now = max(received[rank], sent[rank])
    mine, theirs = _Ends(ranks, [rank]), _Ends(ranks, [r for r in range(len(ranks.held)) if r != rank])
    if not len(mine.stop) or not len(theirs.stop):
        return
    longest = np.minimum((mine.stop - mine.start)[:, None], theirs.stop - theirs.start)
    n = np.stack([longest, longest // 2, longest // 4])
    given, taken = mine.first(n, 1), theirs.first(n, 2)
    many = ranks.pairs.many
    moved = many(given + n) - many(given) - many(taken + n) + many(taken)
    allowed = (n > 0) & (ranks.work[rank] + moved >= -limit) & (np.array(ranks.work)[theirs.rank] - moved >= -limit)

    ends = np.zeros((len(traffic), 1 + max(mine.document.max(), theirs.document.max())), np.int64)
    for of in (mine, theirs):  # 0 where a rank holds nothing of a document
        np.maximum.at(ends, (of.rank, of.document), of.stop)
    of_mine, of_theirs = ends[:, mine.document], ends[:, theirs.document]
    wanted = _wanted(of_mine[:, :, None], given, n) - _wanted(of_theirs[:, None], taken, n)
    most = np.maximum(sent[rank] - wanted, sent[theirs.rank] + wanted)
    need = received[rank] + mine.without(n, 1) + _with(of_theirs[rank], taken, n)
    others = received[theirs.rank] + theirs.without(n, 2) + _with(of_mine[theirs.rank].T, given, n)
    most = np.maximum(most, np.maximum(need, others))
    allowed &= most < now * 5 // 4
    order = most[allowed].argsort(kind="stable")[:PROMISING]
    for length, i, j in np.argwhere(allowed)[order].tolist():
        tokens, a, b = int(n[length, i, j]), int(given[length, i, j]), int(taken[length, i, j])
        give, take = (int(mine.document[i]), a, a + tokens), (int(theirs.document[j]), b, b + tokens)
        yield Exchange(rank, int(theirs.rank[j]), give, take)


class _Ends:
    """Both ends of every part that some ranks hold, one after another."""

    def __init__(self, ranks: Ranks, of: list[int]) -> None:
        found = [
            (rank, d, start, stop, parts[i - 1][1] if i else 0, stop == parts[-1][1], tail)
            for rank in of
            for d, parts in ranks.held[rank].items()
            for i, (start, stop) in enumerate(parts)
            for tail in (False, True)
        ]
        columns = np.array(found, np.int64).reshape(-1, 7).T
        self.rank, self.document, self.start, self.stop, self.before, last, tail = columns
        self.last, self.tail = last.astype(bool), tail.astype(bool)

    def first(self, n: Ints, axis: int) -> Ints:
        """The first of n tokens at these ends."""
        start, stop, tail = (_along(x, axis) for x in (self.start, self.stop, self.tail))
        return np.where(tail, stop - n, start)

    def without(self, n: Ints, axis: int) -> Ints:
        """How many keys more its rank needs of the document without n tokens at these ends."""
        columns = (self.start, self.stop, self.before, self.last, self.tail)
        start, stop, before, last, tail = (_along(x, axis) for x in columns)
        whole = n == stop - start
        end = np.where(whole, before, np.where(tail, stop - n, stop))
        return np.where(last, end - stop, 0) + n


def _with(end: Ints, first: Ints, n: Ints) -> Ints:
    """How many keys more a rank needs of a document that it holds up to ``end``, with n tokens more of it."""
    return np.maximum(end, first + n) - end - n


def _wanted(ends: Ints, first: Ints, n: Ints) -> Ints:
    """How often n tokens are needed, by ranks that hold their document up to these ends: ``[rank, ...]``."""
    return sum(np.minimum(np.maximum(end - first, 0), n) for end in ends)


def _along(x: Ints, axis: int) -> Ints:
    return x[:, None] if axis == 1 else x
