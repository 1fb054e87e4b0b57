"""``Parts``: the segments of all ranks and the kernel for this rank's, around which linear attention is built.

A shard of several segments, or of two directions, becomes a batch of as many segments (``fold``), on which any ``Scan``
works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_plugin.core.layout import Segments
from cp_plugin.core.problem import Problem
from cp_plugin.linear.kernels import Kernel
from cp_plugin.placement.documents import Cut, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the sequence is divided, and by what a rank computes its share."""

    kernel: Kernel
    order: tuple[int, ...]
    """Segment numbers, counted rank by rank, in token order."""
    directions: int = 1
    """1: causal. 2: also from the last token back; each rank's segments then occur twice."""
    uniform: bool = False
    """All segments have the same ``through``, so it need not travel."""
    segments: int = 1
    """Of each rank; s = segments * t."""
    cuts: tuple[tuple[Cut, ...], ...] | None = None
    """On placed tokens, the pieces of the documents that are cut; None on other layouts. A rank then has one segment of
    all its pieces, each of which starts from a zero state."""
    pieces: Tensor | None = None
    """bool ``[t]``: the tokens of this rank that start a piece; None as above."""

    @staticmethod
    def of_segments(problem: Problem, segments: Sequence[Segments], kernel: Kernel) -> Parts:
        """Those of a layout; segments: the positions of every rank's tokens."""
        length = min(len(s) for rank in segments for s in rank)  # adjacent segments of a rank may have been merged
        numbered = [start for rank in segments for s in rank for start in s[::length]]
        return Parts(
            kernel=kernel,
            order=tuple(sorted(range(len(numbered)), key=lambda i: numbered[i])),
            directions=1 if problem.causal or problem.summed else 2,
            uniform=problem.uniform,
            segments=len(numbered) // len(segments),
        )

    @staticmethod
    def of_placement(placement: Placement, index: int, kernel: Kernel, device: torch.device) -> Parts:
        """Those of tokens placed by document; index: of this rank."""
        mine = placement.rank == index
        lengths = placement.stop[mine] - placement.start[mine]
        pieces = torch.zeros(int(lengths.sum()), dtype=torch.bool)
        pieces[torch.from_numpy(lengths.cumsum() - lengths)] = True
        order = tuple(range(placement.size))
        return Parts(kernel=kernel, order=order, cuts=placement.cuts(), pieces=pieces.to(device))

    def fold(self, y: Tensor | None, backwards: Tensor | None = None) -> Tensor | None:
        """Token dimension to batch: ``[s, b, ...] -> [t, directions * segments * b, ...]``.

        backwards: replaces y in the second direction.
        """
        if y is None:
            return None
        split = y.unflatten(0, (self.segments, -1)).transpose(0, 1)
        if self.directions == 1:
            return split.flatten(1, 2)
        other = y if backwards is None else backwards
        other = other.unflatten(0, (self.segments, -1)).transpose(0, 1).flip(0)
        return torch.stack((split, other), 1).flatten(1, 3)

    def unfold(self, y: Tensor) -> tuple[Tensor, ...]:
        """The inverse: one tensor ``[s, b, ...]`` per direction."""
        split = y.unflatten(1, (self.directions, self.segments, -1)).unbind(1)
        split = (split[0], *(other.flip(0) for other in split[1:]))
        return tuple(part.transpose(0, 1).flatten(0, 1) for part in split)
