"""The local kernel: attention of one query shard over one key/value shard, as the tiles between them.

This is where rank numbers become positions and positions become tiles; methods above it only move shards, and the
backend below it only sees one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from cp_plugin.backends import Backend
from cp_plugin.layout import Segments, as_slice
from cp_plugin.merge import add_rows, merge_rows
from cp_plugin.protocol import At, Gradients, Partial
from cp_plugin.tiles import Tile, tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An ``Attend`` without communication."""

    backend: Backend
    segments: Callable[[At], Segments]
    """Whose tokens a tensor holds -> their global positions."""
    causal: bool
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At) -> Partial | None:
        total = None
        for tile in self._tiles(q_at, kv_at):
            rows, keys = as_slice(tile.q), as_slice(tile.k)
            out, lse = self.backend.forward(q[rows], k[keys], v[keys], tile.diagonal, self.scale)
            total = merge_rows(total, tile.q, Partial(out, lse), q)
        return total

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
    ) -> Gradients | None:
        found = self._tiles(q_at, kv_at)
        if not found:
            return None
        row_term = self.backend.row_term(dout, delta)
        dq = dk = dv = None
        for tile in found:
            rows, keys = as_slice(tile.q), as_slice(tile.k)
            grads = self.backend.backward(
                dout[rows], q[rows], k[keys], v[keys], lse[rows], row_term[rows], tile.diagonal, self.scale
            )
            dq = add_rows(dq, tile.q, grads[0], q)
            dk = add_rows(dk, tile.k, grads[1], k)
            dv = add_rows(dv, tile.k, grads[2], v)
        assert dq is not None and dk is not None and dv is not None
        return Gradients(dq, dk, dv)

    def _tiles(self, q_at: At, kv_at: At) -> tuple[Tile, ...]:
        found = tiles(self.segments(q_at), self.segments(kv_at), self.causal)
        if self.backend.any_diagonal:
            return found
        return tuple(part for tile in found for part in tile.cut())
