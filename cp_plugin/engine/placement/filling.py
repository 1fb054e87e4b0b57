"""Placement search: assign the tokens of a pack to ranks.

Every rank has room for a number of tokens and an amount of work. Documents are placed longest first: one that fits goes
to the rank with the most missing work; any other is cut over as few ranks as necessary, which take their shares from
both of its ends:

    position  0 1 2 3 4 5 6 7 8 9 ...
    rank      0 0 0 1 1 2 2 2 1 0

A rank with n tokens of a document, the last at position e - 1, receives e - n keys. Tail tokens see many keys and head
tokens few, so the mix of both sets the work; the more come from the head, the larger n is for the same work and the
fewer keys are sent. Equal shares for all ranks give zigzag.

The shortest documents come last and fill the remaining room. Then the busiest rank trades tails for heads until no rank
exceeds the limit (``placement.exchanges``). Several trials cut documents in different styles, on few ranks a beam
search competes (``placement.beam``), and in the best results the busiest ranks exchange further tokens to reduce
traffic. All arithmetic is in integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cp_plugin.engine.placement.beam import Assigned, beam
from cp_plugin.engine.placement.exchanges import balance, relieve
from cp_plugin.engine.placement.pairs import Ints, Pairs, busy
from cp_plugin.engine.placement.shares import SLACK, Pack, Ranks, Style

SHORT = 32
"""Documents of at most 1 / SHORT of a rank's tokens are placed last, together."""
LIMIT = 49
"""Permitted excess over the mean work at the end, in thousandths."""
FINALISTS = 2
"""Trials that are improved by exchanges, besides the best beam result."""
EFFORT = 2200
"""Total cost of all trials, in documents; a rank counts as 40. On 64 ranks this is one trial."""
STYLES = (
    Style(False, True, True, 7),  # alone the best on 64 ranks
    Style(True, False, True, 5),
    Style(False, False, True, 2),
)
"""Each adds most to those before it, on chat, code and long packs for 4 - 64 ranks and packs of 8 - 32 blocks for 2 -
8; further ones save at most 2 % of the bytes.
"""
ALONE = (Style(True, False, True, 7),)
"""A single document is best cut in equal shares: zigzag."""
WINDOWED = (Style(True, False, False, 7), Style(False, False, False, 7), *STYLES)
"""Within a window every token costs the same and every part needs a window of keys: few parts are best."""


def fill(lengths: Sequence[int], size: int, left: int | None = None) -> Ints:
    """Divide documents over ranks, equal tokens each: the best of several trials.

    Best: balanced (``LIMIT``), then the fewest keys received or sent by the busiest rank.

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
    limit = mean * LIMIT // 1000
    starts: list[_Start] = []
    styles = WINDOWED if left is not None else ALONE if len(lengths) == 1 else STYLES
    for number, style in enumerate(styles):
        if number >= trials and not starts[0].over:
            break
        ranks = _trial(pack, size, pairs, style, limit)
        if trials == 1 and not ranks.excess(limit):
            return ranks.parts()
        starts.append(_rated(number, ranks, limit))
        starts.sort()
    if styles is STYLES and trials > 1:
        ways = enumerate(beam(pack, size, pairs, limit), len(styles))
        others = sorted(_rated(number, _given_out(pack, size, pairs, way, limit), limit) for number, way in ways)
        rounds, patience = trials * max(6, trials) // 6, trials // 2  # small packs gain most
        starts = sorted(
            one._replace(most=relieve(one.ranks, limit, rounds, patience)) for one in starts[:FINALISTS] + others[:1]
        )
    return starts[0].ranks.parts()


class _Start(NamedTuple):
    """A trial's result, ordered by quality."""

    over: int
    """Work of the busiest rank beyond the limit."""
    most: int
    """Keys received or sent by the busiest rank."""
    number: int
    """Unique; breaks ties."""
    ranks: Ranks


def _rated(number: int, ranks: Ranks, limit: int) -> _Start:
    return _Start(ranks.excess(limit), max(busy(ranks.traffic())), number, ranks)


def _trial(pack: Pack, size: int, pairs: Pairs, style: Style, limit: int) -> Ranks:
    ranks = Ranks(size, pack.tokens, pack.mean, pairs)
    longest = max(pack.lengths, default=0)
    fewest = max(0, longest - pack.tokens)
    most = fewest + (longest - fewest) * style.reach // 8
    reserve = _reserve(pack) if style.reserve else 0
    slack = pack.mean * SLACK // 1000
    idle = [(-pack.mean, rank) for rank in range(size)]  # a heap with stale entries
    for d, length, work in zip(pack.long, pack.lengths, pack.works, strict=True):
        while -idle[0][0] != ranks.work[idle[0][1]] or not ranks.tokens[idle[0][1]]:
            heapq.heappop(idle)
        rank = idle[0][1]
        light = work <= ranks.work[rank] + slack
        if light and length > ranks.tokens[rank]:
            fitting = [r for r in range(size) if ranks.tokens[r] >= length and work <= ranks.work[r] + slack]
            rank = max(fitting, key=ranks.work.__getitem__, default=-1)
        if light and rank >= 0:
            ranks.hold(rank, (d, 0, length))
            heapq.heappush(idle, (-ranks.work[rank], rank))
            continue
        if light:  # only tokens are scarce
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
    balance(ranks, limit)
    return ranks


def _given_out(pack: Pack, size: int, pairs: Pairs, way: list[Assigned], limit: int) -> Ranks:
    """Ranks with a beam assignment; unassigned parts go where most work is missing."""
    ranks = Ranks(size, pack.tokens, pack.mean, pairs)
    for part, rank in way:
        if rank >= 0:
            ranks.hold(rank, part)
    for (document, start, stop), rank in way:
        while rank < 0 and start < stop:
            idle = max((r for r in range(size) if ranks.tokens[r]), key=ranks.work.__getitem__)
            n = min(stop - start, ranks.tokens[idle])
            ranks.hold(idle, (document, stop - n, stop))
            stop -= n
    ranks.fill_up(pack.short, pack.short_lengths)
    balance(ranks, limit)
    return ranks


def _drain(idle: list[tuple[int, int]], ranks: Ranks) -> Iterable[int]:
    """Pop ranks with room from the heap, most missing work first."""
    seen = set()
    while idle:
        work, rank = heapq.heappop(idle)
        if -work == ranks.work[rank] and ranks.tokens[rank] and rank not in seen:
            seen.add(rank)
            yield rank


def _reserve(pack: Pack) -> int:
    """Work per token of the short documents that will fill up the ranks that share the long ones."""
    cut = [i for i, work in enumerate(pack.works) if work > pack.mean or pack.lengths[i] > pack.tokens]
    length, work = sum(pack.lengths[i] for i in cut), sum(pack.works[i] for i in cut)
    rest = [*zip(pack.lengths, pack.works, strict=True)][len(cut) :]
    filled = int(pack.short_lengths.sum())
    if (length + filled) * pack.mean >= work * pack.tokens:
        return 0  # the short ones suffice
    spent = 0
    for tokens, pairs in reversed(rest):
        if (length + filled) * pack.mean >= (work + spent) * pack.tokens:
            break
        filled, spent = filled + tokens, spent + pairs
    return spent // filled if filled else 0
