"""Document layout: a layout built per pack, with equal tokens, balanced work and little traffic.

Queries see the keys of their own document only. A layout that ignores document bounds, such as zigzag over the whole
pack, gives some ranks several times the work of others. Three documents on two ranks, the long one cut:

    document   0 0 0 0 0 0 0 0 1 1 2 2
    rank       0 0 1 1 1 1 0 0 0 0 1 1

The work of a rank is the number of visible (query, key) pairs of its queries, under each document's causal mask and the
window, if any. It receives every key that its queries see and that it does not hold, once. ``placement.filling`` has
the search. Related: Zeppelin (arXiv 2509.21841; short documents within a host, long ones across) and FlashCP
(arXiv 2606.08476; whole or cut documents, keys sent where they are seen).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cp_plugin.engine.common.names import not_one_of
from cp_plugin.engine.core.layout import LAYOUTS, Layout, Segments
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.placement.filling import fill
from cp_plugin.engine.placement.pairs import Ints, Pairs, busy, traffic


@dataclass(frozen=True, slots=True)
class Placement:
    """The tokens of a pack on each rank, in pack order; ``layout`` is the corresponding ``Layout``.

    Placements are equal if they are for the same pack, ranks and window.
    """

    documents: tuple[int, ...]
    """Document lengths in pack order."""
    size: int
    """Context-parallel ranks."""
    per_host: int
    """Neighbouring ranks that share a host."""
    left: int | None
    """Earlier tokens that a token sees; None: all of its document."""
    document: Ints = field(compare=False, repr=False)
    """Of each piece (consecutive tokens of one document on one rank), sorted by rank and position."""
    start: Ints = field(compare=False, repr=False)
    """Of each piece: its first token, counted from the start of the document."""
    stop: Ints = field(compare=False, repr=False)
    rank: Ints = field(compare=False, repr=False)

    @property
    def seq_length(self) -> int:
        """Tokens of the pack."""
        return sum(self.documents)

    @property
    def layout(self) -> Layout:
        """The layout of this pack; refuses other lengths and numbers of ranks."""
        return Layout(DOCUMENTS.name, _one_each, self)

    def __call__(self, seq_length: int, size: int, index: int) -> Segments:
        """Segments of a rank, as ``Layout.place``. ValueError for another sequence length or number of ranks."""
        if (seq_length, size) != (self.seq_length, self.size):
            raise ValueError(
                f"this placement of documents is for {self.seq_length} tokens on {self.size} context-parallel ranks, "
                f"not for {seq_length} on {size}: place every pack according to its own document lengths"
            )
        own = slice(*np.searchsorted(self.rank, [index, index + 1]).tolist())
        first = self._begin[self.document[own]]
        ends = zip((first + self.start[own]).tolist(), (first + self.stop[own]).tolist(), strict=True)
        return tuple(range(start, stop) for start, stop in ends)

    def work(self) -> Ints:
        """Visible (query, key) pairs per rank: ``[size]``."""
        work = np.zeros(self.size, np.int64)
        pairs = Pairs(self.left)
        np.add.at(work, self.rank, pairs.many(self.stop) - pairs.many(self.start))
        return work

    @property
    def balance(self) -> float:
        """Work of the busiest rank over the mean."""
        work = self.work()
        return float(work.max() * self.size / work.sum())

    def traffic(self) -> Ints:
        """Keys sent between ranks, each once: ``[receiver, sender]``."""
        return traffic(self.document, self.start, self.stop, self.rank, self.left, self.size)

    @property
    def most(self) -> int:
        """Keys received or sent by the busiest rank, whichever is more."""
        return max(busy(self.traffic()))

    @property
    def _begin(self) -> Ints:
        return np.cumsum((0, *self.documents))


def place(documents: Sequence[int], size: int, *, per_host: int = 1, left: int | None = None) -> Placement:
    """Divide a pack of documents over the ranks: equal tokens, balanced work, few keys to send.

    The busiest rank has at most 1.05 times the mean work, unless ranks have too few tokens for that. The arithmetic is
    in integers and deterministic, so all ranks agree. Recent placements are cached. ValueError if an argument is out of
    range, or ``size`` does not divide the tokens of the pack.

    Args:
        documents: lengths in pack order.
        size: context-parallel ranks.
        per_host: neighbouring ranks per host (``Transport.per_host``); cuts within a host are preferred.
        left: earlier tokens that a token sees (``Mask.left``); None: all of its document.
    """
    return _place(tuple(int(length) for length in documents), size, per_host, left)


@lru_cache(maxsize=64)
def _place(documents: tuple[int, ...], size: int, per_host: int, left: int | None) -> Placement:
    if size < 1 or per_host < 1 or (left is not None and left < 0):
        raise ValueError(
            f"size {size}, per_host {per_host}, left {left}: size and per_host must be 1 or more, left 0 or more"
        )
    if not documents or min(documents) < 1:
        raise ValueError(f"document lengths {documents[:8]}: give at least one document, each of 1 token or more")
    total = sum(documents)
    if total % size:
        raise ValueError(
            f"a pack of {total} tokens cannot be split evenly across {size} context-parallel ranks: pad it to "
            f"{-(-total // size) * size}"
        )
    document, start, stop, rank = fill(documents, size, left)
    if 1 < per_host < size and size % per_host == 0:
        rank = _seats(traffic(document, start, stop, rank, left, size), per_host)[rank]
    by_rank = np.lexsort((start, document, rank))
    pieces = [x[by_rank] for x in (document, start, stop, rank)]
    for x in pieces:
        x.setflags(write=False)  # cached
    return Placement(documents, size, per_host, left, *pieces)


def _one_each(size: int) -> int:
    return size


DOCUMENTS = Layout("documents", _one_each, lambda n, size, index: _place((n,), size, 1, None)(n, size, index))
"""``--cp-layout documents`` before a pack is known: one document."""


def _seats(traffic: Ints, per_host: int) -> Ints:
    """Renumber ranks: swap two between hosts as long as that reduces traffic across hosts."""
    both = traffic + traffic.T
    everyone = np.arange(len(both))
    host = everyone // per_host
    for _ in everyone:
        with_host = np.zeros_like(both)
        np.add.at(with_host.T, host, both.T)
        gain = with_host[:, host] - with_host[everyone, host][:, None]
        gain = np.where(host[:, None] == host, 0, gain + gain.T - 2 * both)
        a, b = divmod(int(gain.argmax()), len(both))
        if gain[a, b] <= 0:
            break
        host[a], host[b] = host[b], host[a]
    seats = np.empty_like(everyone)
    seats[np.argsort(host, kind="stable")] = everyone
    return seats


ALL: dict[str, Layout] = LAYOUTS | {DOCUMENTS.name: DOCUMENTS}


def get_layout(name: str) -> Layout:
    """The layout of that name; ValueError, which lists the valid ones, for an unknown name."""
    if name not in ALL:
        raise ValueError(not_one_of(spelled("layout", name), name, ALL))
    return ALL[name]
