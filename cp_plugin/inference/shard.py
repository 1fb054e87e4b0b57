"""Decode on one rank: attention of replicated queries to the keys that this rank keeps.

Sequences of a batch differ in length, so positions are compared one by one. On a GPU this is two kernels per layer
(``cp_kernels.decode``). Plain torch reads keys in blocks and converts them to the accumulation dtype there: memory
beyond the cache does not grow with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.core.block import Scores
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.mask import Window
from cp_plugin.core.values import Partial
from cp_plugin.inference.store import Cache
from cp_plugin.kernels import fused
from cp_plugin.kernels.backends import reference
from cp_plugin.kernels.merge import merge_all

ELEMENTS = 2**22
"""Scores, and elements of keys, per block."""


def attend(
    q: Tensor, cache: Cache, held: Tensor, positions: Tensor, scores: Scores, window: Window | None = None
) -> Partial:
    """Causal attention to the occupied slots, by position; ValueError on a GPU, for a dtype or head size that its
    kernel does not support.

    Args:
        q: ``[t, b, h, d]``.
        held: positions of the slots, int32 ``[n, b]``.
        positions: of the queries, int32 ``[t, b]``.

    Returns:
        out ``[t, b, h, e]`` and lse ``[t, b, h]`` in the accumulation dtype; 0 and -inf for a query that sees nothing.
    """

    def in_blocks() -> fused.Parts:
        out, lse = _attend(q, cache, held, positions, scores, window)
        return out.unsqueeze(0), lse.unsqueeze(0)

    left = -1 if window is None else window[0]
    parts = fused.decode(q, *cache.kept(len(held)), cache.v_head_dim, held, positions, scores.scale, left, in_blocks)
    return Partial(*fused.merge_parts(*parts))


def _attend(q: Tensor, cache: Cache, held: Tensor, positions: Tensor, scores: Scores, window: Window | None) -> Partial:
    t, b, h, d = q.shape
    wide = accumulation_dtype(q.dtype)
    block = max(1, ELEMENTS // (b * h * max(t, d)))
    found = [
        Partial(*reference.attend(q.to(wide), *cache.get(i, j), _hidden(held[i:j], positions, window), scores))
        for i, j in ((i, min(i + block, len(held))) for i in range(0, len(held), block))
    ]
    out = q.new_zeros((t, b, h, cache.v_head_dim), dtype=wide)
    return merge_all(found) or Partial(out, q.new_full((t, b, h), -torch.inf, dtype=wide))


def _hidden(held: Tensor, positions: Tensor, window: Window | None) -> Tensor:
    """Which slots a query does not see: bool ``[b, 1, 1, t, n]``."""
    apart = positions.T.unsqueeze(2) - held.T.unsqueeze(1)
    seen = apart >= 0
    if window is not None and window[0] != -1:
        seen &= apart <= window[0]
    return ~seen[:, None, None]
