"""The local kernel: attention of one query shard over one key/value shard.

This is where rank numbers become positions; methods above it only move shards, and the kernel below it only sees the
positions of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cp_plugin.core.layout import Segments
from cp_plugin.core.mask import Mask
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Owners, Partial, Queries, Sums
from cp_plugin.kernels.blocks import Block, BlockKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An ``Attend`` without communication."""

    kernel: BlockKernel
    segments: Callable[[Owners], Segments]
    """Whose tokens a tensor holds -> their global positions."""
    keys: Callable[[Owners], Segments]
    """The same for k and v: other positions where they hold more than the queries' tokens (a cache)."""
    mask: Mask
    scale: float

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        return self.kernel.forward(queries.q, kv.k, kv.v, self._block(queries, kv), self.scale, onto)

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        q, dout, lse, delta = queries.tensors
        return self.kernel.backward(dout, q, kv.k, kv.v, lse, delta, self._block(queries, kv), self.scale, onto)

    def _block(self, queries: Queries, kv: KeyValues) -> Block:
        block = Block(self.segments(queries.owners), self.keys(kv.owners), self.mask)
        for side, x in ((block.rows, queries.q), (block.keys, kv.k)):
            assert sum(map(len, side)) == x.size(0), f"{sum(map(len, side))} positions for {x.size(0)} tokens"
        return block
