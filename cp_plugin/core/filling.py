"""Which tokens of which document go to which rank: the search behind ``cp_plugin.core.documents``.

Every rank has room for so many tokens and so much work. Documents are taken longest first. One that fits goes to the
rank with the most work left to do; one that does not is cut over as few ranks as it needs. Ranks take what they get of
a cut document from both of its ends, one after another:

    position  0 1 2 3 4 5 6 7 8 9 ...
    rank      0 0 0 1 1 2 2 2 1 0

A rank with n tokens of a document, the last of them at position e - 1, has to be sent e - n keys. Tokens at the tail
see many keys, tokens at the head few, so that n tokens from both ends are as much work as is wanted; and the more of
them are from the head, the larger n is for the same work, and the fewer keys there are to send. With equal shares for
all this is zigzag.

The shortest documents come last and fill the ranks up. Then the busiest rank gives the tail of a document for the head
of another, equally long, until no rank exceeds the limit. All of this is done in integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cp_plugin.core.pairs import Intervals, Ints, Pairs

Part = tuple[int, int, int]
"""Document, start, stop."""

SHORT = 32
"""Documents of at most 1 / SHORT of a rank's tokens come last, all together."""
SLACK = 30
LIMIT = 49
"""Thousandths of the mean work that whole documents may exceed it by, and that a rank may in the end."""
FEW = 4
"""Exchanges of two ranks that are looked at."""
EFFORT = 3300
"""What all trials may cost together, in documents; a rank costs as much as 40 of them. That is about 5 ms."""


class Style(NamedTuple):
    """How documents are cut that are too long for a rank. What is best depends on the pack, so several are tried."""

    even: bool
    """Equal shares of the work, instead of one full rank after another."""
    reserve: bool
    """Work is left for the documents that will fill up a rank's tokens."""
    mirrored: bool
    """Every rank takes of the head as it does of the tail; else only as far as its need asks for it."""
    reach: int
    """Eighths between the fewest keys that the longest document's last rank may need, and all of them."""


STYLES = (
    Style(True, True, True, 3),  # alone the best on many ranks
    Style(False, True, True, 6),
    Style(True, False, True, 5),
    Style(False, False, True, 2),
    Style(False, True, False, 5),
    Style(False, True, True, 1),
    Style(False, True, False, 0),
    Style(False, False, True, 3),
    Style(True, True, False, 7),
    Style(False, False, True, 0),
    Style(False, True, False, 2),
    Style(False, True, False, 4),
)
"""Each adds most to those in front of it, on 144 packs of chat, code and long documents for 4 to 32 ranks."""
WINDOWED = (Style(True, False, False, 7), Style(False, False, False, 7), *STYLES)
"""Within a window tokens cost the same wherever they are, and every part needs a window's keys: few parts are best."""


class Ranks:
    """What each rank holds, and what it has room for."""

    def __init__(self, size: int, tokens: int, work: int, pairs: Pairs) -> None:
        self.pairs = pairs
        self.mean = work
        self.tokens = [tokens] * size
        """Room for tokens."""
        self.work = [work] * size
        """What is missing to the mean work; negative where a rank has more."""
        self.need = [0] * size
        """Keys that it has to be sent."""
        self.held: list[dict[int, Intervals]] = [{} for _ in range(size)]
        self.last = np.empty((4, 0), np.int64)
        """Parts of the short documents: document, start, stop, rank."""

    def give(self, rank: int, document: int, parts: Intervals) -> None:
        """These parts of a document that the rank has nothing of yet."""
        self.held[rank][document] = parts
        self.tokens[rank] -= sum(stop - start for start, stop in parts)
        self.work[rank] -= self.pairs.of(parts)
        self.need[rank] += self.pairs.missing(parts)

    def cut(self, document: int, length: int, shares: Mapping[int, int], style: Style, most: int) -> None:
        """Divide a document over ranks, the first of which holds its end.

        Args:
            shares: rank -> the work that it can take; more than is in the document.
            most: the keys that a rank should need in all, where its work allows it.
        """
        pairs, head, tail = self.pairs, 0, length
        share_left, room = sum(shares.values()), sum(self.tokens[rank] for rank in shares)
        for rank, share in shares.items():
            rest, todo = tail - head, pairs(tail) - pairs(head)
            room -= self.tokens[rank]
            if not rest:
                return
            work = todo
            if share_left:
                work = todo * share // share_left if style.even else min(todo, share + self.mean * SLACK // 1000)
            share_left -= share
            n = tail - pairs.tokens(pairs(tail) - work)
            if style.mirrored:
                n = max(n, rest * work // todo)
            n = max(n, tail - max(0, most - self.need[rank]))
            n = min(n, pairs.tokens(pairs(head) + work) - head)  # all from the head: less work there is not
            n = min(max(n, rest - room), self.tokens[rank], rest)
            x = n if n == rest else pairs.heads(head, tail, n, work)
            parts = [(head, tail)] if n == rest else [(head, head + x), (tail - n + x, tail)]
            if parts := [(start, stop) for start, stop in parts if start < stop]:
                self.give(rank, document, parts)
            head, tail = head + x, tail - n + x

    def share(self, rank: int, density: int, reserve: int) -> int:
        """The work that a rank can take of a document, and still has enough for what fills up its tokens.

        Args:
            density: work for a token of the document.
            reserve: work to leave for every token of room that remains.
        """
        if density <= reserve:
            return max(0, self.work[rank])
        return max(0, (self.work[rank] - reserve * self.tokens[rank]) * density // (density - reserve))

    def fill_up(self, documents: Ints, lengths: Ints) -> None:
        """Short documents, one after another, into whatever room there is for tokens.

        They are taken in an order in which any run of them is like all of them: by multiples of the golden ratio.
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

    def exchange(self, limit: int) -> None:
        """Exchange tokens until no rank works more than ``limit`` above the mean, or nothing more is found."""
        work = self.work
        for _ in range(4 * len(work)):
            busiest = min(range(len(work)), key=work.__getitem__)
            over = -limit - work[busiest]
            if over <= 0:
                return
            for idle in sorted(range(len(work)), key=work.__getitem__, reverse=True)[:3]:
                most = work[idle] + limit
                if most > 0 and (found := self._cheapest(busiest, idle, min(over, most * 3 // 4), most)):
                    self._swap(busiest, idle, *found)
                    break
            else:
                return

    def _cheapest(self, busy: int, idle: int, least: int, most: int) -> tuple[Part, Part] | None:
        """The end of a part of one rank's for the beginning of one of another's, equally long, that moves this work.

        Of the first few that are found, the one after which the two need the fewest keys.
        """
        pairs, wanted, best = self.pairs, (least + most) // 2, None
        mine, yours = self.held[busy], self.held[idle]
        theirs = [(start, stop, d) for d, parts in yours.items() for start, stop in parts]
        theirs.sort(key=lambda part: (part[0], -part[1], part[2]))
        found = 0
        for stop, start, document in sorted((b, a, d) for d, parts in mine.items() for a, b in parts):
            for begin, end, other in theirs:
                n = pairs.exchanged(stop, begin, min(stop - start, end - begin), wanted)
                if n and least <= pairs.moved(stop, begin, n) <= most:
                    sent = self.need[idle] + (0 if document in yours else stop - n)
                    cost = max(sent, self.need[busy] + (0 if other in mine else begin))
                    if best is None or cost < best[0]:
                        best = cost, (document, stop - n, stop), (other, begin, begin + n)
                    found += 1
                    if found == FEW:
                        return best[1:]
        return best and best[1:]

    def _need_after(self, rank: int, given: Part, taken: Part) -> int:
        after = self._after(rank, given, taken)
        before = (self.pairs.missing(self.held[rank].get(document, [])) for document in after)
        return self.need[rank] + sum(map(self.pairs.missing, after.values())) - sum(before)

    def _after(self, rank: int, given: Part, taken: Part) -> dict[int, Intervals]:
        """What the rank holds of the two documents after an exchange."""
        held = self.held[rank]
        after = {given[0]: _without(held[given[0]], given[1], given[2])}
        after[taken[0]] = _with(after.get(taken[0], held.get(taken[0], [])), taken[1], taken[2])
        return after

    def _swap(self, a: int, b: int, of_a: Part, of_b: Part) -> None:
        for rank, given, taken in ((a, of_a, of_b), (b, of_b, of_a)):
            self.need[rank] = self._need_after(rank, given, taken)
            self.work[rank] += self.pairs.of([given[1:]]) - self.pairs.of([taken[1:]])
            self.held[rank].update(self._after(rank, given, taken))
            if not self.held[rank][given[0]]:
                del self.held[rank][given[0]]

    def parts(self) -> Ints:
        """Everything: document, start, stop, rank; ``[4, parts]``."""
        held = [
            (d, start, stop, r) for r, of in enumerate(self.held) for d, parts in of.items() for start, stop in parts
        ]
        return np.concatenate([np.array(held, np.int64).reshape(-1, 4).T, self.last], 1)


class Pack(NamedTuple):
    """The documents, and what the ranks have of them on average."""

    long: list[int]
    """Documents that are placed one by one, the longest first."""
    lengths: list[int]
    """Of these."""
    works: list[int]
    """Of these."""
    short: Ints
    """The others, from long to short."""
    short_lengths: Ints
    tokens: int
    """Of one rank."""
    mean: int
    """Work of one rank."""


def fill(lengths: Sequence[int], size: int, left: int | None = None) -> Ints:
    """Divide documents over ranks, equally many tokens each: the best of several trials.

    That is a balanced one (``LIMIT``) in which the neediest rank has to be sent the fewest keys.

    Returns:
        Document, start, stop and rank of each part: int64 ``[4, parts]``.
    """
    pairs, all_lengths = Pairs(left), np.array(lengths, np.int64)
    tokens = int(all_lengths.sum()) // size
    order = np.argsort(-all_lengths, kind="stable")
    by_length = all_lengths[order]
    long = int(np.searchsorted(-by_length, -(tokens // SHORT)))
    mean = int(pairs.many(all_lengths).sum()) // size
    few, rest = by_length[:long], order[long:]
    pack = Pack(order[:long].tolist(), few.tolist(), pairs.many(few).tolist(), rest, by_length[long:], tokens, mean)
    trials = max(1, EFFORT // (long + 40 * size))
    best: tuple[tuple[int, int], Ranks] | None = None
    for number, style in enumerate(STYLES if left is None else WINDOWED):
        if best is not None and number >= trials and not best[0][0]:
            break
        ranks = _trial(pack, size, pairs, style)
        score = max(0, -min(ranks.work) - mean * LIMIT // 1000), max(ranks.need)
        if best is None or score < best[0]:
            best = score, ranks
    assert best is not None
    return best[1].parts()


def _trial(pack: Pack, size: int, pairs: Pairs, style: Style) -> Ranks:
    ranks = Ranks(size, pack.tokens, pack.mean, pairs)
    longest = max(pack.lengths, default=0)
    fewest = max(0, longest - pack.tokens)
    most = fewest + (longest - fewest) * style.reach // 8
    reserve = _reserve(pack) if style.reserve else 0
    slack = pack.mean * SLACK // 1000
    idle = [(-pack.mean, rank) for rank in range(size)]  # a heap; entries that no longer hold are skipped
    for d, length, work in zip(pack.long, pack.lengths, pack.works, strict=True):
        while -idle[0][0] != ranks.work[idle[0][1]] or not ranks.tokens[idle[0][1]]:
            heapq.heappop(idle)
        rank = idle[0][1]
        light = work <= ranks.work[rank] + slack
        if light and length > ranks.tokens[rank]:
            fitting = [r for r in range(size) if ranks.tokens[r] >= length and work <= ranks.work[r] + slack]
            rank = max(fitting, key=ranks.work.__getitem__, default=-1)
        if light and rank >= 0:
            ranks.held[rank][d] = [(0, length)]
            ranks.tokens[rank] -= length
            ranks.work[rank] -= work
            heapq.heappush(idle, (-ranks.work[rank], rank))
            continue
        if light:  # only tokens are short
            by_room: Iterable[int] = sorted(range(size), key=lambda r: (-ranks.tokens[r], r))
        else:
            by_room = _drain(idle, ranks)
        room = can = 0
        shares: dict[int, int] = {}
        for r in by_room:
            room += ranks.tokens[r]
            shares[r] = ranks.share(r, work // length, reserve)
            can += shares[r]
            if room >= length and len(shares) > 1 and (light or can >= work - slack or ranks.work[r] <= 0):
                break
        expected = {r: min(ranks.tokens[r], length * share // max(1, can)) for r, share in shares.items()}
        chosen = sorted(shares, key=lambda r: (ranks.need[r] - expected[r], r))
        ranks.cut(d, length, {r: shares[r] for r in chosen}, style, most)
        for r in chosen:
            if ranks.tokens[r]:
                heapq.heappush(idle, (-ranks.work[r], r))
    ranks.fill_up(pack.short, pack.short_lengths)
    ranks.exchange(pack.mean * LIMIT // 1000)
    return ranks


def _drain(idle: list[tuple[int, int]], ranks: Ranks) -> Iterable[int]:
    """Ranks with room, those with the most work left to do first; they are taken from the heap."""
    seen = set()
    while idle:
        work, rank = heapq.heappop(idle)
        if -work == ranks.work[rank] and ranks.tokens[rank] and rank not in seen:
            seen.add(rank)
            yield rank


def _reserve(pack: Pack) -> int:
    """Work for each token of the short documents that fill up the ranks over which the long ones are cut."""
    cut = [i for i, work in enumerate(pack.works) if work > pack.mean or pack.lengths[i] > pack.tokens]
    length, work = sum(pack.lengths[i] for i in cut), sum(pack.works[i] for i in cut)
    rest = [*zip(pack.lengths, pack.works, strict=True)][len(cut) :]
    filled = int(pack.short_lengths.sum())
    if (length + filled) * pack.mean >= work * pack.tokens:
        return 0  # the very short ones are enough
    spent = 0
    for tokens, pairs in reversed(rest):
        if (length + filled) * pack.mean >= (work + spent) * pack.tokens:
            break
        filled, spent = filled + tokens, spent + pairs
    return spent // filled if filled else 0


def _without(parts: Intervals, start: int, stop: int) -> Intervals:
    cut = ((a, b) for c, d in parts for a, b in ((c, min(d, start)), (max(c, stop), d)))
    return [(a, b) for a, b in cut if a < b]


def _with(parts: Intervals, start: int, stop: int) -> Intervals:
    joined: Intervals = []
    for a, b in sorted([*parts, (start, stop)]):
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined
