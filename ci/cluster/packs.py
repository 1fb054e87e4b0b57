"""Packed documents on a virtual cluster: the packs, and the placement of a contestant's tokens.

    needed@placed     by document length: ``cp_plugin.attention.packs.place_documents``
    ring@zigzag       zigzag over the whole pack
    ring@each         every document zigzag over all ranks, in 2 x ranks chunks, as in Transformer Engine

Lengths are those of ``cp_plugin.cli.bench.cases`` with ``TOKENS`` per rank, divided by an integer, rounded to whole
chunks of ``LEAST`` tokens: nothing is padded, whereas Transformer Engine pads documents to a multiple of 2 x ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import torch

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention.calls import Inputs, Setup
from cp_plugin.attention.packs import place_documents
from cp_plugin.cli.bench.cases import LENGTHS, TOKENS
from cp_plugin.cli.bench.contestants import Entry, Provided
from cp_plugin.core.layout import LAYOUTS
from cp_plugin.planner.packs import each_by_itself

LEAST = 2
"""Tokens of a chunk; chunks of one have no step, which makes kernels of tiles slow."""
PLACES = ("placed", "each", *LAYOUTS)
_SMALL = (1, 3, 1, 5, 2, 4)
"""Document lengths of the pack on which results are checked, in shortest documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPack(Entry):
    """A provider and a placement: ``ring@each``."""

    place: str

    @classmethod
    def parse(cls, text: str, flag: str = "--run") -> Self:
        """Read ``name[:options]@place``; ValueError naming the wrong part."""
        before, _, place = text.partition("@")
        entry = Entry.parse(before, flag)
        if not entry.provided:
            raise ValueError(f"{flag} {text}: {entry.unsupported(Problem(size=1, documents=True))}")
        if place not in PLACES:
            raise ValueError(f"{flag} {text}: say where tokens are, as in {before}@placed: {', '.join(PLACES)}")
        return cls(name=entry.name, options=entry.options, place=place)

    def __str__(self) -> str:
        return f"{Entry.__str__(self)}@{self.place}"

    def placed(self, cp: ContextParallel, bounds: Sequence[int]) -> ContextParallel:
        """The same with the pack's layout."""
        if self.place == "placed":
            return place_documents(cp, torch.tensor(bounds))
        return cp.with_layout(each_by_itself(bounds) if self.place == "each" else LAYOUTS[self.place])


class Contestant:
    """A provider on packs, which are identified by their lengths."""

    def __init__(self, entry: OnPack, cp: ContextParallel, setup: Setup, packs: Sequence[Sequence[int]]) -> None:
        """packs: the document bounds of each."""
        self.on = {bounds[-1]: entry.placed(cp, bounds) for bounds in packs}
        self._provided = {
            bounds[-1]: Provided(
                self.on[bounds[-1]], setup, replace(setup.problem, seq_length=bounds[-1]), torch.tensor(bounds)
            )
            for bounds in packs
        }
        self._cp, self.settings, self.notes = cp, entry.place, tuple(setup.why)

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        return self._provided[x.size(0)].shard(x)

    def arranged(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def step(self, x: Inputs, between: Callable[[], object] = lambda: None) -> tuple[torch.Tensor, ...]:
        return self._provided[x.q.size(0) * self._cp.size].step(x, between)

    def booked(self) -> int:
        return next(iter(self._provided.values())).booked()


def on_cluster(kind: str, size: int, seq_length: int) -> tuple[int, ...]:
    """Document bounds of a pack scaled down to whole chunks; the last document is cut off."""
    chunks, scale = LEAST * 2 * size, TOKENS * size // seq_length
    lengths = [chunks * max(1, round(length / scale / chunks)) for length in LENGTHS[kind].pack(TOKENS * size, 0)]
    inside = [end for end in accumulate(lengths, initial=0) if end < seq_length]
    return (*inside, seq_length)


def small(size: int) -> tuple[int, ...]:
    """Document bounds of a short pack."""
    return tuple(accumulate((LEAST * 2 * size * n for n in _SMALL), initial=0))
