"""The local kernel: attention of one query shard over one key/value shard, without communication.

Here rank numbers become positions: methods above only move shards, the kernel below only sees the positions of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Owners, Partial, Queries, Sums
from cp_plugin.engine.kernels.backends import BlockKernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An ``Attend`` without communication."""

    kernel: BlockKernel
    segments: Callable[[Owners], Segments]
    """Owners of a tensor -> global positions of its tokens."""
    keys: Callable[[Owners], Segments]
    """The same for k and v, which differ where they hold more than the queries' tokens (a cache)."""
    mask: Mask
    scores: Scores

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        return self.kernel.forward(queries, kv, self._block(queries, kv), onto)

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        return self.kernel.backward(queries, kv, self._block(queries, kv), onto)

    def with_keys(self, positions: Segments) -> Local:
        """The same over keys at these positions, whoever held them."""
        return replace(self, keys=lambda owners: positions)

    def _block(self, queries: Queries, kv: KeyValues) -> Block:
        rows, keys = self.segments(queries.owners), self.keys(kv.owners)
        places, tokens = (sum(map(len, rows)), sum(map(len, keys))), (queries.q.size(0), kv.k.size(0))
        assert places == tokens, f"{places} positions of queries and keys for {tokens} tokens"
        return Block(rows, keys, self.mask, self.scores)
