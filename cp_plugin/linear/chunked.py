r"""Chunked linear attention in plain torch: quadratic within a chunk, chunk states between chunks.

    chunk 0 [\ ]          within a chunk     (q k^T * decay, causal) v
    chunk 1 [#][\ ]       between chunks     by ``segment``'s algebra, as between ranks
    chunk 2 [#][#][\ ]

Products of q and k are multiplied by exp(sum of log decays between them), never divided, so strong decays do not
overflow; the sum is never a difference of longer sums, so float32 suffices. With one decay per key dimension (GLA,
arXiv 2312.06635, section 4) chunks are split into blocks: keys decay to the start of the query's block, queries from
it.

Forward and backward hold the products of one slab of chunks at a time; other memory is proportional to the tokens and
the states between chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear import scan, segment
from cp_plugin.linear.segment import Tokens

_CHUNK, _BLOCK = 64, 16
_HELD = 2**24
"""Elements of a slab's largest tensor; a backward holds about ten of them (64 MiB each in float32)."""


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state: ``[t, b, h, e]`` in the accumulation dtype."""
    t = x.q.size(0)
    n = -(-t // _CHUNK)
    chunks = Tokens(*(None if y is None else _fold(y, n) for y in x))
    read, write, through = segment.edges(chunks)
    left = segment.state(chunks, write).unflatten(0, (n, -1))
    incoming = scan.states(left, None if through is None else through.unflatten(0, (n, -1)))[:-1]
    out = _in_slabs(chunks) + segment.read(chunks, read, incoming.flatten(0, 1))
    return _unfold(out, n)[:t]


def extend(x: Tokens, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Continue a sequence in generation: outputs and the new state, in the accumulation dtype.

    before: the state after all earlier tokens, ``[b, g, d, e]``; None at the start.
    """
    read, write, through = segment.edges(x)
    out, left = forward(x), segment.state(x, write)
    if before is None:
        return out, left
    return out + segment.read(x, read, before), segment.after(before, left, through)


def _in_slabs(x: Tokens) -> Tensor:
    """``_within`` for a limited number of chunks at a time."""
    t, _, g, d = x.k.shape
    by_key = x.log_decay is not None and x.log_decay.size(3) > 1
    largest = max(x.q.size(2) * t**2, g * d * _BLOCK**2 if by_key else 0)
    size = max(1, _HELD // largest)
    return _within(x) if size >= x.q.size(1) else _Slabs.apply(size, *x)


class _Slabs(torch.autograd.Function):
    """Saves only the tokens; the backward recomputes each slab."""

    @staticmethod
    def forward(ctx: Any, size: int, *tokens: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tokens)
        ctx.size = size
        return torch.cat([_within(slab) for slab in _slabs(Tokens(*tokens), size)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x = Tokens(*ctx.saved_tensors)
        slabs = zip(dout.split(ctx.size, 1), _slabs(x, ctx.size), strict=True)
        found = [segment.recomputed(_within, *each) for each in slabs]
        grads = [torch.cat(parts, 1) for parts in zip(*found, strict=True)]
        return None, *grads, *(None,) * (5 - len(grads))


def _slabs(x: Tokens, size: int) -> list[Tokens]:
    starts = range(0, x.q.size(1), size)
    return [Tokens(*(None if y is None else y[:, start : start + size] for y in x)) for start in starts]


def _within(x: Tokens) -> Tensor:
    """Causal attention within each chunk: ``[t, b, h, e]``."""
    dtype = accumulation_dtype(x.q.dtype)
    q, k, v = segment.by_group(x).to(dtype), x.k.to(dtype), x.v.to(dtype)
    t = q.size(0)
    hidden = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    if x.starts is not None:
        documents = x.starts.cumsum(0).transpose(0, 1)
        hidden = (hidden | (documents[:, :, None] != documents[:, None, :]))[:, None, None]
    if x.log_decay is None:
        scores = torch.einsum("ibgrd,jbgd->bgrij", q, k)
    elif x.log_decay.size(3) == 1:
        scores = torch.einsum("ibgrd,jbgd->bgrij", q, k) * _between(segment.log_decays(x))
    else:
        scores = _scores_by_dimension(q, k, segment.log_decays(x))
    return torch.einsum("bgrij,jbge->ibgre", scores.masked_fill(hidden, 0), v).flatten(2, 3)


def _between(decay: Tensor) -> Tensor:
    """exp(sum of the log decays ``[t, b, g, 1]`` in (j, i]): ``[b, g, 1, i, j]``, 1 where j is after i."""
    return _sums_between(decay).squeeze(4).permute(1, 2, 0, 3).exp().unsqueeze(2)


def _sums_between(decay: Tensor) -> Tensor:
    """Sums of the log decays in (j, i]: ``[i, b, g, j, x]``, 0 where j is after i."""
    t = decay.size(0)
    after = torch.ones(t, t, dtype=torch.bool, device=decay.device).tril(-1)
    return (decay.unsqueeze(3) * after.view(t, 1, 1, t, 1)).cumsum(0)


def _scores_by_dimension(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """q_i k_j with a decay per key dimension: ``[b, g, r, i, j]``; undefined where j is after i."""
    rows, until = [], decay[:0]  # the sums from each earlier token to the start of the block
    for start in range(0, q.size(0), _BLOCK):
        block = slice(start, start + _BLOCK)
        since = decay[block].cumsum(0)
        between = _sums_between(decay[block])
        keys = between.exp() * k[block].permute(1, 2, 0, 3)  # i b g j d
        earlier = torch.einsum("ibgrd,jbgd->bgrij", q[block] * since.exp().unsqueeze(3), k[:start] * until.exp())
        inside = torch.einsum("ibgrd,ibgjd->bgrij", q[block], keys)
        later = inside.new_zeros((*inside.shape[:4], q.size(0) - start - inside.size(4)))
        rows.append(torch.cat((earlier, inside, later), 4))
        until = torch.cat((until + since[-1], between[-1].permute(2, 0, 1, 3)))
    return torch.cat(rows, 3)


def _fold(y: Tensor, n: int) -> Tensor:
    """``[t, b, ...]`` as n chunks ``[chunk, n * b, ...]``, zero-padded: no key, no decay, no new document."""
    missing = n * _CHUNK - y.size(0)
    y = pad(y, (0, 0) * (y.dim() - 1) + (0, missing)) if missing else y
    return y.unflatten(0, (n, _CHUNK)).transpose(0, 1).flatten(1, 2)


def _unfold(y: Tensor, n: int) -> Tensor:
    return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
