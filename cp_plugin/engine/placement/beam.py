"""Beam search over placements of the long documents, for small numbers of ranks. See ``placement.filling``.

Documents are cut into pieces of a fraction of a rank's share, which are assigned one after another: longest document
first, each from its end. The beam keeps the states with the fewest keys to send for the busiest rank and the most even
remaining work per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cp_plugin.engine.placement.pairs import Ints, Pairs
from cp_plugin.engine.placement.shares import Pack, Part

PER_RANK = (4, 3, 6, 5)
"""Pieces per rank of each search."""
WIDEST, NARROWEST = 256, 64
"""Beam width. The cost of a search, pieces * ranks * states, is limited to a rank's tokens, since its benefit grows
with them; where that leaves fewer than NARROWEST states, there is no search.
"""
ENDS = 8
"""Final states returned by each search."""
_INSIDE, _ROOM, _WORK, _RECEIVED, _SENT = range(5)
"""State of a rank: whether it holds part of the current document, its token room, the work missing to the mean, and the
keys that it receives and sends.
"""
_FACTORS = np.array(
    [0x1E3779B97F4A7C15, 0x42B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5, 0x05EBCA77C2B2AE63]
).reshape(5, 1, 1)
"""Large odd hash multipliers that tell states apart."""


class Assigned(NamedTuple):
    """Part of a document assigned to a rank."""

    part: Part
    rank: int
    """-1: to any rank with room."""


class _Step(NamedTuple):
    """Origin of each state: parent state, the rank that took the piece, and how many of its tokens."""

    parent: Ints
    rank: Ints
    taken: Ints


def beam(pack: Pack, size: int, pairs: Pairs, limit: int) -> Iterator[list[Assigned]]:
    """The most promising assignments of the long documents; none where the search would be too expensive.

    limit: permitted work of a rank above the mean.
    """
    spent = 0
    for per in PER_RANK:
        pieces = list(_pieces(pack, -(-pack.tokens // per)))
        kept = min(WIDEST, pack.tokens // max(1, len(pieces) * size))
        if pieces and kept >= NARROWEST and spent < 2 * pack.tokens:
            spent += len(pieces) * size * kept
            yield from _search(pieces, kept, pack, size, pairs, limit)


def _pieces(pack: Pack, longest: int) -> Iterator[Part]:
    for document, length in zip(pack.long, pack.lengths, strict=True):
        for stop in range(length, 0, -longest):
            yield document, max(0, stop - longest), stop


def _search(pieces: list[Part], kept: int, pack: Pack, size: int, pairs: Pairs, limit: int) -> Iterator[list[Assigned]]:
    state, left = np.zeros((5, 1, size), np.int64), np.zeros(1, np.int64)
    state[_ROOM], state[_WORK] = pack.tokens, pack.mean
    room, work = pack.tokens * size, pack.mean * size
    steps: list[_Step] = []
    at_hand = -1
    for document, start, stop in pieces:
        if document != at_hand:
            state[_INSIDE], at_hand = 0, document
        room, work = room - (stop - start), work - (pairs(stop) - pairs(start))
        step, state, left = _children(state, left, start, stop, pairs, limit)
        best = _best(state, left, start, room, max(1, work), pack)[:kept]
        state, left = state[:, best], left[best]
        steps.append(_Step(*(x[best] for x in step)))
    ends = np.argsort(state[_RECEIVED:].max((0, 2)) + left, kind="stable")[:ENDS]
    for end in ends.tolist():
        yield _way(pieces, steps, end)


def _children(state: Ints, left: Ints, start: int, stop: int, pairs: Pairs, limit: int) -> tuple[_Step, Ints, Ints]:
    """All states in which one rank has taken a piece, or as much of its end as it has room for."""
    take = np.minimum(state[_ROOM], stop - start)
    work = pairs(stop) - pairs.many(stop - take)
    allowed = (take > 0) & ((2 * take > stop - start) | (take == take.max(1, keepdims=True)))
    light = allowed & (work <= state[_WORK] + limit)
    parent, rank = np.nonzero(light if light.any() else allowed)
    taken, work = take[parent, rank], work[parent, rank]
    after, child = state[:, parent], np.arange(len(parent))
    before = after[_INSIDE, child, rank]
    after[_SENT, child, rank] += taken * (after[_INSIDE].sum(1) - before)
    after[_RECEIVED, child, rank] += np.where(before, 0, stop) - taken
    after[_ROOM, child, rank] -= taken
    after[_WORK, child, rank] -= work
    after[_INSIDE, child, rank] = 1
    return _Step(parent, rank, taken), after, left[parent] + (stop - start - taken)


def _best(state: Ints, left: Ints, start: int, room: int, work: int, pack: Pack) -> Ints:
    """Indices of the distinct states, best first.

    Args:
        start: unassigned tokens of the current document.
        room, work: unassigned tokens of all documents, and their work.
    """
    size = state.shape[2]
    density = (work << 8) // max(1, room)
    uneven = np.abs(state[_WORK] - (state[_ROOM] * density >> 8)).max(1) // max(1, pack.mean // pack.tokens)
    received = state[_RECEIVED] - state[_INSIDE] * np.minimum(state[_ROOM], start)  # may still take it
    busy = np.maximum(state[_SENT], received)
    cost = size * (4 * (busy.max(1) + left) + 2 * uneven) + busy.sum(1)
    code = (state * _FACTORS).sum(0)
    code = (code ^ code >> 29) * _FACTORS[0]
    _, different = np.unique(code.sum(1), return_index=True)  # up to renumbering ranks
    return different[np.argsort(cost[different], kind="stable")]


def _way(pieces: list[Part], steps: list[_Step], state: int) -> list[Assigned]:
    """The assignments that lead to a state."""
    assigned = []
    for (document, start, stop), step in zip(reversed(pieces), reversed(steps), strict=True):
        middle = stop - int(step.taken[state])
        assigned.append(Assigned((document, middle, stop), int(step.rank[state])))
        if start < middle:
            assigned.append(Assigned((document, start, middle), -1))
        state = int(step.parent[state])
    return assigned
