"""The local kernel: attention of one query shard over one key/value shard, as the tiles between them.

This is where rank numbers become positions and positions become tiles; methods above it only move shards, and the
backend below it only sees one tile at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.backends import Backend
from cp_plugin.layout import Segments, sort_positions, take
from cp_plugin.mask import Mask
from cp_plugin.merge import add_rows, merge_rows
from cp_plugin.protocol import At, Gradients, Partial
from cp_plugin.tiles import Tile, tiles


class Sorted(NamedTuple):
    """How the stored tokens of a shard are put in the order that needs the fewest tiles, and back."""

    segments: Segments
    order: Tensor | None
    """``sorted[i] = stored[order[i]]``; None: they stay as they are."""

    def sort(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors if self.order is None else tuple(t[self.order] for t in tensors)

    def store(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.order is None:
            return tensors
        return tuple(torch.empty_like(t).index_copy_(0, self.order, t) for t in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An ``Attend`` without communication."""

    backend: Backend
    segments: Callable[[At], Segments]
    """Whose tokens a tensor holds -> their global positions."""
    mask: Mask
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At) -> Partial | None:
        rows_in, keys_in = self._sorted(q_at, q.device), self._sorted(kv_at, k.device)
        (q,), (k, v) = rows_in.sort(q), keys_in.sort(k, v)
        total = None
        for tile in self._tiles(rows_in.segments, keys_in.segments):
            q_t, k_t, v_t = take(q, tile.q), take(k, tile.k), take(v, tile.k)
            out, lse = self.backend.forward(q_t, k_t, v_t, tile.diagonal, self.scale)
            total = merge_rows(total, tile.q, Partial(out, lse), q)
        return Partial(*rows_in.store(*total)) if total is not None else None

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
        rows_in, keys_in = self._sorted(q_at, q.device), self._sorted(kv_at, k.device)
        found = self._tiles(rows_in.segments, keys_in.segments)
        if not found:
            return None
        (q, dout, lse, delta), (k, v) = rows_in.sort(q, dout, lse, delta), keys_in.sort(k, v)
        row_term = self.backend.row_term(dout, delta)
        dq = dk = dv = None
        for tile in found:
            dout_t, q_t, lse_t, row_term_t = (take(x, tile.q) for x in (dout, q, lse, row_term))
            k_t, v_t = take(k, tile.k), take(v, tile.k)
            grads = self.backend.backward(dout_t, q_t, k_t, v_t, lse_t, row_term_t, tile.diagonal, self.scale)
            dq = add_rows(dq, tile.q, grads[0], q)
            dk = add_rows(dk, tile.k, grads[1], k)
            dv = add_rows(dv, tile.k, grads[2], v)
        assert dq is not None and dk is not None and dv is not None
        return Gradients(*rows_in.store(dq), *keys_in.store(dk, dv))

    def _sorted(self, at: At, device: torch.device) -> Sorted:
        segments = self.segments(at)
        return Sorted(segments, None) if self.mask.full else Sorted(*sort_positions(segments, device))

    def _tiles(self, q: Segments, k: Segments) -> tuple[Tile, ...]:
        found = tiles(q, k, self.mask)
        if self.backend.any_diagonal:
            return found
        return tuple(part for tile in found for part in tile.cut())
