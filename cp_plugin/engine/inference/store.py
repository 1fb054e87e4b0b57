"""One layer's cache on one rank, and attention to it: keys and values in the model's dtype or in one byte per element.

With multi-latent attention it holds one vector per token, from which a matrix makes the keys and values of all heads.

In one byte: e4m3 and a power of two per (token, batch, head), like payloads of ``--cp-fp8 comm``
(``engine.core.payload``) in blocks of one token, since tokens arrive one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.core import payload
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.mask import Window
from cp_plugin.engine.core.values import Partial
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.kernels.backends import reference
from cp_plugin.engine.kernels.merge import merge_all

Where = slice | tuple[Tensor, Tensor]
"""Slots; or int64 ``[n]`` slots and sequences."""


class Latent(NamedTuple):
    """What multi-latent attention makes keys and values of (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Decode does not materialise keys: queries and outputs are multiplied instead.
    """

    rows: Tensor
    """``[s, b, 1, r + p]``: compressed keys and values, followed by the rotated part of the keys."""
    up_k: Tensor
    """``[h, d - p, r]``: the rest of head h's key is ``up_k[h] @ compressed``."""
    up_v: Tensor
    """``[h, e, r]``: its value."""

    def heads(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each head from such rows."""
        rank = self.up_k.size(2)
        compressed, rotated = rows.split((rank, rows.size(3) - rank), 3)
        k = torch.einsum("sbxr,hdr->sbhd", compressed, self.up_k)
        v = torch.einsum("sbxr,her->sbhe", compressed, self.up_v)
        return torch.cat((k, rotated.expand(-1, -1, k.size(2), -1)), 3), v.contiguous()

    def queries(self, q: Tensor) -> Tensor:
        """Queries whose keys are the rows themselves."""
        plain = self.up_k.size(1)
        return torch.cat((torch.einsum("sbhd,hdr->sbhr", q[..., :plain], self.up_k), q[..., plain:]), 3)

    def outputs(self, out: Tensor) -> Tensor:
        """Outputs from those whose values are the compressed part of the rows."""
        return torch.einsum("sbhr,her->sbhe", out, self.up_v.to(out.dtype))


class Cache:
    """One layer's keys ``[capacity, b, g, d]`` and values ``[capacity, b, g, e]``.

    A latent cache has rows only: they are the keys, and their first ``v_head_dim`` elements the values.
    """

    def __init__(self, capacity: int, v_head_dim: int, *like: Tensor, fp8: bool = False) -> None:
        """
        Args:
            like: keys and values, or rows, as those to come.
            fp8: in one byte per element and one more per row; ValueError for a dtype that cannot be packed.
        """
        self.v_head_dim, self._dtype = v_head_dim, like[0].dtype
        if fp8 and self._dtype not in payload.DTYPES:
            raise ValueError(f"an FP8 cache holds {payload.DTYPES}, got {self._dtype}")
        stored = torch.uint8 if fp8 else self._dtype
        rows = [x.new_zeros((capacity, *x.shape[1:]), dtype=stored) for x in like]
        self._stores: list[fused.CachedRows] = [(x, torch.ones_like(x[..., 0]) if fp8 else None) for x in rows]

    @property
    def nbytes(self) -> int:
        """Bytes, full or empty."""
        return sum(x.nbytes for store in self._stores for x in store if x is not None)

    def put(self, where: Where, *x: Tensor) -> None:
        """Keep rows: ``[n, b, h, d]`` in a slice of slots, ``[n, h, d]`` each in its slot of its sequence."""
        for (stored, exponents), new in zip(self._stores, x, strict=True):
            if exponents is None:
                stored[where] = new
            elif len(new):
                packed, scales = fused.pack((new if new.dim() == 4 else new.unsqueeze(1)).contiguous(), 1)
                stored[where], exponents[where] = packed.view(torch.uint8).view(new.shape), scales.view(new.shape[:-1])

    def get(self, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values in the slots ``first .. stop - 1``, in the model's dtype; read-only."""
        k, *v = (
            rows[first:stop] if scales is None else fused.unpack(rows[first:stop], scales[first:stop], 1, self._dtype)
            for rows, scales in self._stores
        )
        return k, v[0] if v else k[..., : self.v_head_dim]

    def kept(self, slots: int) -> tuple[fused.CachedRows, fused.CachedRows | None]:
        """The first slots as stored."""
        k, *v = ((rows[:slots], None if scales is None else scales[:slots]) for rows, scales in self._stores)
        return k, v[0] if v else None


ELEMENTS = 2**22
"""Scores, and elements of keys, per block."""


def attend(
    q: Tensor, cache: Cache, held: Tensor, positions: Tensor, scores: Scores, window: Window | None = None
) -> Partial:
    """Causal attention to the occupied slots, by position; ValueError on a GPU, for a dtype or head size that its
    kernel does not support.

    Sequences of a batch differ in length, so positions are compared one by one. On a GPU this is two kernels per layer
    (``cp_kernels.decode``). Plain torch reads keys in blocks and converts them to the accumulation dtype there: memory
    beyond the cache does not grow with the context.

    Args:
        q: ``[t, b, h, d]``.
        held: positions of the slots, int32 ``[n, b]``.
        positions: of the queries, int32 ``[t, b]``.

    Returns:
        out ``[t, b, h, e]`` and lse ``[t, b, h]`` in the accumulation dtype; 0 and -inf for a query that sees nothing.
    """

    def attend_in_blocks() -> fused.Parts:
        (t, b, h, d), e, n, wide = q.shape, cache.v_head_dim, len(held), q.to(accumulation_dtype(q.dtype))
        block = max(1, ELEMENTS // (b * h * max(t, d)))
        partials = [
            Partial(*reference.attend(wide, *cache.get(i, j), _hidden(held[i:j], positions, window), scores))
            for i, j in ((i, min(i + block, n)) for i in range(0, n, block))
        ]
        out, lse = merge_all(partials) or (wide.new_zeros((t, b, h, e)), wide.new_full((t, b, h), -torch.inf))
        return out.unsqueeze(0), lse.unsqueeze(0)

    left = -1 if window is None else window[0]
    cached = *cache.kept(len(held)), cache.v_head_dim, held
    parts = fused.decode(q, *cached, positions, scores.scale, left, scores.softcap, attend_in_blocks)
    return Partial(*fused.merge_parts(*parts))


def _hidden(held: Tensor, positions: Tensor, window: Window | None) -> Tensor:
    """Return True for slots that a query does not see: bool ``[b, 1, 1, t, n]``."""
    apart = positions.T.unsqueeze(2) - held.T.unsqueeze(1)
    seen = apart >= 0
    if window is not None and window[0] != -1:
        seen &= apart <= window[0]
    return ~seen[:, None, None]
