"""The local kernel: attention of one query shard over one key/value shard.

This is where rank numbers become positions; methods above it only move shards, and the kernel below it only sees the
positions of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cp_plugin.core.layout import Segments
from cp_plugin.core.mask import Mask
from cp_plugin.core.values import NO_SUMS, Gradients, Partial, Sums
from cp_plugin.kernels.blocks import Block, BlockKernel
from cp_plugin.methods.protocol import At


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An ``Attend`` without communication."""

    kernel: BlockKernel
    segments: Callable[[At], Segments]
    """Whose tokens a tensor holds -> their global positions."""
    keys: Callable[[At], Segments]
    """The same for k and v: other positions where they hold more than the queries' tokens (a cache)."""
    mask: Mask
    scale: float

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At, onto: Partial | None = None
    ) -> Partial | None:
        return self.kernel.forward(q, k, v, self._block(q_at, kv_at), self.scale, onto)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        q_at: At,
        kv_at: At,
        onto: Sums = NO_SUMS,
    ) -> Gradients | None:
        return self.kernel.backward(dout, q, k, v, lse, delta, self._block(q_at, kv_at), self.scale, onto)

    def _block(self, q_at: At, kv_at: At) -> Block:
        return Block(self.segments(q_at), self.keys(kv_at), self.mask)
