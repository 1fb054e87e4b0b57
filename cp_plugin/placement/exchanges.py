"""Two ranks exchange equally many tokens: for balance, or to have fewer keys sent. See ``placement.filling``."""

from __future__ import annotations

import numpy as np

from cp_plugin.placement.pairs import Ints
from cp_plugin.placement.shares import Part, Ranks

FEW = 4
"""Exchanges of two ranks that are looked at for balance."""


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


def relieve(ranks: Ranks, limit: int, rounds: int) -> None:
    """Exchange tokens so that the rank that needs the most keys needs fewer, and the other does not need as many.

    All exchanges of either end of its parts with those of others' are looked at, for a few lengths at once. There must
    be no window.
    """
    for _ in range(rounds):
        needy = max(range(len(ranks.need)), key=ranks.need.__getitem__)
        found = _fewest(ranks, needy, limit) if ranks.need[needy] else None
        if found is None:
            return
        ranks.swap(needy, *found)


def _fewest(ranks: Ranks, needy: int, limit: int) -> tuple[int, Part, Part] | None:
    """The other rank, what it is given and what it gives; None where nothing makes the greater of their needs less.

    Arrays have the dimensions [length, part of the needy rank and its end, part of another and its end].
    """
    mine, theirs = _Ends(ranks, [needy]), _Ends(ranks, [r for r in range(len(ranks.held)) if r != needy])
    longest = np.minimum((mine.stop - mine.start)[:, None], theirs.stop - theirs.start)
    n = np.stack([longest, longest // 2, longest // 4])
    given, taken = mine.first(n, 1), theirs.first(n, 2)
    many = ranks.pairs.many
    moved = many(given + n) - many(given) - many(taken + n) + many(taken)
    other = np.array(ranks.work)[theirs.rank]
    allowed = (n > 0) & (ranks.work[needy] + moved >= -limit) & (other - moved >= -limit)
    allowed &= mine.document[:, None] != theirs.document

    here, there = _ends(ranks, [needy], theirs.document), _ends(ranks, theirs.rank.tolist(), mine.document).T
    need = ranks.need[needy] + mine.without(n, 1) + _with(here, taken, n)
    others = np.array(ranks.need)[theirs.rank] + theirs.without(n, 2) + _with(there, given, n)
    most = np.where(allowed, np.maximum(need, others), ranks.need[needy]).clip(max=ranks.need[needy])
    if not most.size or most.min() == ranks.need[needy]:
        return None
    length, i, j = np.unravel_index(int(most.argmin()), most.shape)
    tokens, a, b = int(n[length, i, j]), int(given[length, i, j]), int(taken[length, i, j])
    give, take = (int(mine.document[i]), a, a + tokens), (int(theirs.document[j]), b, b + tokens)
    return int(theirs.rank[j]), give, take


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


def _ends(ranks: Ranks, of: list[int], documents: Ints) -> Ints:
    """The end of what ranks hold of documents, 0 where they hold nothing: ``[ranks, documents]``."""
    nothing = [(0, 0)]
    return np.array([[ranks.held[rank].get(d, nothing)[-1][1] for d in documents.tolist()] for rank in of])


def _with(end: Ints, first: Ints, n: Ints) -> Ints:
    """How many keys more a rank needs of a document that it holds up to ``end``, with n tokens more of it."""
    return np.maximum(end, first + n) - end - n


def _along(x: Ints, axis: int) -> Ints:
    return x[:, None] if axis == 1 else x
