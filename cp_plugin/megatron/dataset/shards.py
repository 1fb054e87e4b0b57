"""How the work is divided: into shards of a few megabytes, the same ones whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cp_plugin.megatron.dataset.documents import Piece
from cp_plugin.megatron.dataset.sources import Source

SMALLEST = 4 * 2**20
"""Bytes of a shard: what a killed run loses at most, per worker."""
MOST = 4096
"""Shards of one dataset, about."""

type Shard = tuple[Piece, ...]


def shards(sources: Sequence[Source], size: int | None = None) -> list[Shard]:
    """Consecutive pieces, about ``size`` bytes in each shard; long ``.jsonl`` files are cut at ends of lines."""
    if size is None:
        size = max(SMALLEST, sum(source.size for source in sources) // MOST)
    found: list[Shard] = []
    begun: list[Piece] = []
    held = 0
    for piece in _pieces(sources, size):
        begun.append(piece)
        held += piece.end - piece.begin
        if held >= size:
            found.append(tuple(begun))
            begun, held = [], 0
    return [*found, tuple(begun)] if begun else found


def _pieces(sources: Sequence[Source], size: int) -> Iterator[Piece]:
    for number, source in enumerate(sources):
        step = size if source.kind == "lines" and not source.packed else max(1, source.size)
        for begin in range(0, max(1, source.size), step):
            yield Piece(source=number, begin=begin, end=min(begin + step, source.size))
