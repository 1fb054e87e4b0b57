"""Local search by exchanging equally many tokens between two ranks, for balance or less traffic.

See ``placement.filling``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cp_plugin.engine.placement.pairs import Ints, busy
from cp_plugin.engine.placement.shares import Part, Ranks

FEW = 4
"""Candidate exchanges per pair of ranks when balancing."""
PROMISING = 4
"""Exchanges that are evaluated exactly, chosen by estimate."""


class Exchange(NamedTuple):
    """Equally many tokens sent by each of two ranks."""

    rank: int
    other: int
    sent: Part
    taken: Part

    @property
    def back(self) -> Exchange:
        """The inverse exchange."""
        return Exchange(self.rank, self.other, self.taken, self.sent)


def balance(ranks: Ranks, limit: int) -> None:
    """Exchange tokens until no rank exceeds the mean work by more than ``limit``, or no exchange helps."""
    work = ranks.work
    for _ in range(4 * len(work)):
        busiest = min(range(len(work)), key=work.__getitem__)
        over = -limit - work[busiest]
        if over <= 0:
            return
        for idle in sorted(range(len(work)), key=work.__getitem__, reverse=True)[:3]:
            most = work[idle] + limit
            if most > 0 and (parts := _cheapest(ranks, busiest, idle, min(over, most * 3 // 4), most)):
                ranks.swap(busiest, idle, *parts)
                break
        else:
            return


def _cheapest(ranks: Ranks, busy: int, idle: int, least: int, most: int) -> tuple[Part, Part] | None:
    """An exchange of the end of one rank's part for the beginning of another's that moves ``least .. most`` work.

    Of the first few candidates, the one that leaves both ranks with the fewest keys to receive.
    """
    pairs, wanted, best = ranks.pairs, (least + most) // 2, None
    busy_held, idle_held = ranks.held[busy], ranks.held[idle]
    theirs = [(start, stop, d) for d, parts in idle_held.items() for start, stop in parts]
    theirs.sort(key=lambda part: (part[0], -part[1], part[2]))
    candidates = 0
    for stop, start, document in sorted((b, a, d) for d, parts in busy_held.items() for a, b in parts):
        for begin, end, other in theirs:
            n = pairs.exchanged(stop, begin, min(stop - start, end - begin), wanted)
            if n and least <= pairs.moved(stop, begin, n) <= most:
                sent = ranks.need[idle] + (0 if document in idle_held else stop - n)
                cost = max(sent, ranks.need[busy] + (0 if other in busy_held else begin))
                if best is None or cost < best[0]:
                    best = cost, (document, stop - n, stop), (other, begin, begin + n)
                candidates += 1
                if candidates == FEW:
                    return best[1:]
    return best and best[1:]


def relieve(ranks: Ranks, limit: int, rounds: int, patience: int) -> int:
    """Tabu search that reduces the keys received or sent by the busiest rank.

    Exchanges of either end of the busiest rank's parts are estimated for a few lengths at once; the best of the
    promising ones is made even if it is a step back, unless its state was visited before. Steps that did not pay off
    are undone at the end. Windows are not supported.

    Args:
        rounds: maximum number of exchanges.
        patience: maximum number of consecutive exchanges without improvement.

    Returns:
        Keys received or sent by the busiest rank in the end.
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
    """Exchanges of the busiest rank, best estimate first.

    The estimate is rough for two parts of one document. Exchanges that would leave either rank a quarter above the
    current maximum are left out. Arrays are indexed [length, end of the busiest rank's parts, end of the other ranks'
    parts].
    """
    received, sent = traffic.sum(1), traffic.sum(0)
    rank = int(np.maximum(received, sent).argmax())
    now = max(received[rank], sent[rank])
    own, theirs = _Ends(ranks, [rank], 1), _Ends(ranks, [r for r in range(len(ranks.held)) if r != rank])
    if not len(own.stop) or not len(theirs.stop):
        return
    longest = np.minimum(own.stop - own.start, theirs.stop - theirs.start)
    n = np.stack([longest, longest // 2, longest // 4])
    own_first, their_first = own.first(n), theirs.first(n)
    many = ranks.pairs.many
    moved = many(own_first + n) - many(own_first) - many(their_first + n) + many(their_first)
    allowed = (n > 0) & (ranks.work[rank] + moved >= -limit) & (np.array(ranks.work)[theirs.rank] - moved >= -limit)

    ends = np.zeros((len(traffic), 1 + max(own.document.max(), theirs.document.max())), np.int64)
    for of in (own, theirs):  # 0: holds nothing of the document
        np.maximum.at(ends, (of.rank, of.document), of.stop)
    of_own, of_theirs = ends[:, own.document], ends[:, theirs.document]
    wanted = _wanted(of_own, own_first, n) - _wanted(of_theirs[:, None], their_first, n)
    most = np.maximum(sent[rank] - wanted, sent[theirs.rank] + wanted)
    need = received[rank] + own.keys_without(n) + _added_keys(of_theirs[rank], their_first, n)
    others = received[theirs.rank] + theirs.keys_without(n) + _added_keys(of_own[theirs.rank, :, 0].T, own_first, n)
    most = np.maximum(most, np.maximum(need, others))
    allowed &= most < now * 5 // 4
    order = most[allowed].argsort(kind="stable")[:PROMISING]
    for length, i, j in np.argwhere(allowed)[order].tolist():
        tokens, a, b = int(n[length, i, j]), int(own_first[length, i, j]), int(their_first[length, i, j])
        give, take = (int(own.document[i, 0]), a, a + tokens), (int(theirs.document[j]), b, b + tokens)
        yield Exchange(rank, int(theirs.rank[j]), give, take)


class _Ends:
    """Both ends of every part held by some ranks: ``[ends]``, with ``further`` dimensions of size 1 behind."""

    def __init__(self, ranks: Ranks, of: list[int], further: int = 0) -> None:
        rows = [
            (rank, d, start, stop, parts[i - 1][1] if i else 0, stop == parts[-1][1], tail)
            for rank in of
            for d, parts in ranks.held[rank].items()
            for i, (start, stop) in enumerate(parts)
            for tail in (False, True)
        ]
        columns = np.array(rows, np.int64).reshape(-1, 7).T.reshape(7, -1, *(1,) * further)
        self.rank, self.document, self.start, self.stop, self.before, last, tail = columns
        self.last, self.tail = last.astype(bool), tail.astype(bool)

    def first(self, n: Ints) -> Ints:
        """First of the n tokens at each end."""
        return np.where(self.tail, self.stop - n, self.start)

    def keys_without(self, n: Ints) -> Ints:
        """Additional keys its rank needs of the document after giving up n tokens at each end."""
        whole = n == self.stop - self.start
        end = np.where(whole, self.before, np.where(self.tail, self.stop - n, self.stop))
        return np.where(self.last, end - self.stop, 0) + n


def _added_keys(end: Ints, first: Ints, n: Ints) -> Ints:
    """Additional keys a rank needs of a document held up to ``end`` after taking n more tokens of it."""
    return np.maximum(end, first + n) - end - n


def _wanted(ends: Ints, first: Ints, n: Ints) -> Ints:
    """Return how often n tokens are needed by ranks that hold their document up to these ends: ``[rank, ...]``."""
    return sum(np.minimum(np.maximum(end - first, 0), n) for end in ends)
