"""A block kernel that computes nothing: returns uninitialised results and reports its calls.

Runs a method on meta tensors and a mesh without peers: ``cp_plugin.attention.calls.without_peers``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_plugin.core.block import Block
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.tiles import may_meet
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.kernels.merge import accumulator, add_sums


@dataclass(frozen=True, slots=True)
class RecordingKernel:
    """A ``BlockKernel`` without attention; results are uninitialised."""

    asked: Callable[[Queries, KeyValues, Block], object] = lambda queries, kv, block: None
    """Called in both directions; in the backward queries carry a dout."""

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None:
        self.asked(queries, kv, block)
        if not may_meet(*block.area):
            return onto
        return Partial(accumulator(onto.out), onto.lse) if onto is not None else Partial(*results(queries.q, kv.v))

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None:
        self.asked(queries, kv, block)
        if not may_meet(*block.area):
            return None
        return add_sums(onto, Gradients(*map(torch.empty_like, (queries.q, *kv.tensors))))


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised kernel results: out ``[s, b, h, e]`` and lse ``[s, b, h]``."""
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.size(3))), lse
