"""Products of queries and keys within a chunk, each with the decay between its tokens.

They are multiplied by exp(sum of the log decays between them), never divided, so strong decays do not overflow; the sum
is never a difference of longer sums, so float32 suffices. With one decay per key dimension (GLA, arXiv 2312.06635,
section 4) chunks are split into blocks: keys decay to the start of the query's block, queries from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_plugin.engine.linear.tokens import Tokens, log_decays, slabs

BLOCK = 16
HELD = 2**24
"""Elements of the largest tensor of chunks that are in memory at a time; a backward holds about ten of them (64 MiB
each in float32)."""


def run_slabs[T](compute: Callable[[Tokens], T], x: Tokens, join: Callable[[list[T]], T]) -> T:
    """``compute`` for as many chunks at a time as have products of at most ``HELD`` elements; a backward recomputes
    each slab."""
    t, _, g, d = x.k.shape
    by_key = x.log_decay is not None and x.log_decay.size(3) > 1
    size = max(1, HELD // max(x.q.size(2) * t**2, g * d * BLOCK**2 if by_key else 0))
    if size >= x.q.size(1):
        return compute(x)
    again = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    return join([again(slab) for slab in slabs(x, size)])


def scores(q: Tensor, k: Tensor, x: Tokens) -> Tensor:
    """q_i k_j with the decay between them: ``[b, g, r, i, j]``; 0 where j is hidden from i.

    Args:
        q: ``[t, b, g, r, d]``; k: ``[t, b, g, d]``.
        x: has the decays and the documents.
    """
    t = q.size(0)
    hidden = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    if x.starts is not None:
        documents = x.starts.cumsum(0).transpose(0, 1)
        hidden = (hidden | (documents[:, :, None] != documents[:, None, :]))[:, None, None]
    if x.log_decay is not None and x.log_decay.size(3) > 1:
        return _multiply_by_dimension(q, k, log_decays(x)).masked_fill(hidden, 0)
    pairs = torch.einsum("ibgrd,jbgd->bgrij", q, k)
    if x.log_decay is not None:
        pairs = pairs * _sums_between(log_decays(x)).squeeze(4).permute(1, 2, 0, 3).exp().unsqueeze(2)  # b g 1 i j
    return pairs.masked_fill(hidden, 0)


def _sums_between(decay: Tensor) -> Tensor:
    """Sums of the log decays in (j, i]: ``[i, b, g, j, x]``, 0 where j is after i."""
    t = decay.size(0)
    after = torch.ones(t, t, dtype=torch.bool, device=decay.device).tril(-1)
    return (decay.unsqueeze(3) * after.view(t, 1, 1, t, 1)).cumsum(0)


def _multiply_by_dimension(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """q_i k_j with a decay per key dimension: ``[b, g, r, i, j]``; undefined where j is after i."""
    rows, until = [], decay[:0]  # the sums from each earlier token to the start of the block
    for start in range(0, q.size(0), BLOCK):
        block = slice(start, start + BLOCK)
        since = decay[block].cumsum(0)
        between = _sums_between(decay[block])
        keys = between.exp() * k[block].permute(1, 2, 0, 3)  # i b g j d
        earlier = torch.einsum("ibgrd,jbgd->bgrij", q[block] * since.exp().unsqueeze(3), k[:start] * until.exp())
        inside = torch.einsum("ibgrd,ibgjd->bgrij", q[block], keys)
        later = inside.new_zeros((*inside.shape[:4], q.size(0) - start - inside.size(4)))
        rows.append(torch.cat((earlier, inside, later), 4))
        until = torch.cat((until + since[-1], between[-1].permute(2, 0, 1, 3)))
    return torch.cat(rows, 3)
