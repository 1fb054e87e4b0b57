"""Sharding: which tokens every rank holds, and the whole sequence from all shards."""

from __future__ import annotations

from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.attention import agreement, autocast
from cp_plugin.engine.comm import Mesh, coordinates, flat_index
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.core.layout import Layout, Segments
from cp_plugin.engine.core.values import Owners

_SEGMENTS = 4096
"""Size of the cache of positions."""


class Sharding:
    """Sequences sharded over the ranks of a mesh in a layout."""

    mesh: Mesh
    layout: Layout
    numbers: tuple[int, ...]
    """rank -> its number in the layout."""

    def _number(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers
        self._segments_of = lru_cache(_SEGMENTS)(partial(segments_of, self.layout, numbers))

    @property
    def size(self) -> int:
        """Number of context-parallel ranks."""
        return self.mesh.size

    @property
    def index(self) -> int:
        """This rank's number."""
        return self.mesh.index

    @property
    def divisor(self) -> int:
        """The number that must divide the length of a sequence."""
        return self.layout.divisor(self.size)

    def pad(self, x: Tensor, dim: int = 0, value: float = 0) -> Tensor:
        """``x`` with ``value`` behind its last token along ``dim``, up to the next multiple of ``divisor``.

        Under a causal mask no token sees the padding; otherwise make it a document of its own by ``cu_seqlens``. Leave
        it out of the loss, and drop it after ``unshard``: ``y.narrow(dim, 0, seq_length)``.
        """
        missing = -x.size(dim) % self.divisor
        after = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing]
        return torch.nn.functional.pad(x, after, value=value) if missing else x

    @eager
    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """This rank's tokens of ``x``, whose dimension ``dim`` is the whole sequence; differentiable."""
        with autocast.off(x.device.type):  # which joins no tensors of another half precision than its own
            return self.layout.shard(x, dim, self.size, self.numbers[self.index])

    @eager
    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """The whole tensor from every rank's shard, on every rank.

        Differentiable, with the whole tensor taken as replicated: each rank keeps its own slice of the gradient.

        Raises:
            ValueError: for a shape or dtype (compared in the first calls, and rarely after) that other ranks do not
                have.
        """
        with agreement.compare_call(self, "unshard", (x,)) as settings:
            settings |= {"dim": dim % x.dim(), "tokens": x.size(dim)}
        return Unshard.apply(x, dim % x.dim(), self.mesh, self.layout, self.numbers)

    @eager
    def positions(self, seq_length: int, device: torch.device | str = "cpu") -> Tensor:
        """Global positions of this rank's tokens: int64 ``[seq_length / size]``, computed on the device."""
        return self.layout.positions(seq_length, self.size, self.numbers[self.index], device)

    def segments(self, seq_length: int, owners: Owners) -> Segments:
        """Global positions of the tokens that a tensor holds here."""
        return self._segments_of(seq_length, owners(self.index))


class Unshard(torch.autograd.Function):
    """The whole tensor on every rank; each rank keeps its own slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, mesh: Mesh, layout: Layout, numbers: tuple[int, ...]) -> Tensor:
        ctx.kept = (layout, dim, mesh.size, numbers[mesh.index])
        with autocast.off(x.device.type):
            shards = [x.movedim(dim, 0)]
            for axis in reversed(mesh.axes):  # fastest axis first: the order of the flat index
                shards = list(mesh.all_gather(axis, shards).wait())
            by_rank = shards[0].chunk(mesh.size)
            return layout.unshard([by_rank[numbers.index(n)] for n in range(mesh.size)], 0).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, *kept = ctx.kept
        with autocast.off(grad.device.type):
            return layout.shard(grad, *kept), None, None, None, None


def segments_of(layout: Layout, numbers: tuple[int, ...], seq_length: int, ranks: tuple[int, ...]) -> Segments:
    """Global positions of these ranks' tokens, concatenated.

    numbers: rank -> its number in the layout.
    """
    shards = (layout.segments(seq_length, len(numbers), numbers[rank]) for rank in ranks)
    return tuple(segment for shard in shards for segment in shard)


def token_order(axes: dict[str, int], beside: tuple[str, ...], layout: Layout) -> tuple[int, ...]:
    """rank -> its number in the layout.

    Ranks along the ``beside`` axes gather their tokens, which then form the fewest segments if these ranks have
    neighbouring numbers or, where tokens are dealt out cyclically, numbers as far apart as possible.
    """
    gathered = {name: n for name, n in axes.items() if name in beside}
    others = {name: n for name, n in axes.items() if name not in beside}
    order = {**gathered, **others} if layout.cyclic else {**others, **gathered}
    return tuple(flat_index(order, coordinates(axes, rank)) for rank in range(prod(axes.values())))
