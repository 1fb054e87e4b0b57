r"""Linear attention inside segments, in chunks: quadratic within a chunk, by states between chunks. Plain torch.

    chunk 0 [\ ]          within a chunk     (q k^T * decay, causal) v
    chunk 1 [#][\ ]       between chunks     by ``segment``'s algebra, as between ranks
    chunk 2 [#][#][\ ]

Decays are applied to products of q and k as exp(sum of log decays between them), never as a quotient, so strong decays
do not overflow. With one decay per key dimension (GLA, arXiv 2312.06635, section 4) that sum depends on the dimension:
a chunk is cut once more into blocks; block by block, keys decay to the block's start and queries from there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.dtypes import accumulation_dtype
from cp_plugin.linear import segment
from cp_plugin.linear.segment import Tokens

_CHUNK, _BLOCK = 64, 16


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a state of zero: ``[t, b, h, e]`` in the accumulation dtype."""
    t = x.q.size(0)
    n = -(-t // _CHUNK)
    chunks = Tokens(*(None if y is None else _fold(y, n) for y in x))
    read, write, through = segment.edges(chunks)
    left = segment.state(chunks, write).unflatten(0, (n, -1))
    incoming = segment.before_each(left, None if through is None else through.unflatten(0, (n, -1)))
    out = _within(chunks) + segment.read(chunks, read, incoming.flatten(0, 1))
    return _unfold(out, n)[:t]


def backward(dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and, where there is one, the log decay. Computes the forward again."""
    return segment.recomputed(forward, dout, x)


def extend(x: Tokens, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """The next tokens of a sequence, for generation: outputs, and the state after them; in the accumulation dtype.

    before: the state that all earlier tokens left behind, ``[b, g, d, e]``; None at the start.
    """
    read, write, through = segment.edges(x)
    out, left = forward(x), segment.state(x, write)
    if before is None:
        return out, left
    return out + segment.read(x, read, before), segment.after(before, left, through)


def _within(x: Tokens) -> Tensor:
    """Each token of a chunk with those before it in the chunk, and itself: ``[t, b, h, e]``."""
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
        scores = torch.einsum("ibgrd,jbgd->bgrij", q, k) * _between(segment.log_decays(x)[..., 0], dtype)
    else:
        scores = _scores_by_dimension(q, k, segment.log_decays(x))
    return torch.einsum("bgrij,jbge->ibgre", scores.masked_fill(hidden, 0), v).flatten(2, 3)


def _between(decay: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(sum of the log decays ``[t, b, g]`` after j up to i): ``[b, g, 1, i, j]``, 1 where j is after i."""
    total = decay.cumsum(0).permute(1, 2, 0)
    return (total[..., :, None] - total[..., None, :]).clamp(max=0).exp().to(dtype)[:, :, None]


def _scores_by_dimension(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """q_i k_j with a decay in every dimension of the key: ``[b, g, r, i, j]``, of no meaning where j is after i."""
    total, rows = decay.cumsum(0), []
    for start in range(0, q.size(0), _BLOCK):
        block = slice(start, start + _BLOCK)
        at_start = total[start - 1] if start else torch.zeros_like(total[0])
        since = (total[block] - at_start).exp().to(q.dtype)
        until = (at_start - total[:start]).exp().to(q.dtype)
        earlier = torch.einsum("ibgrd,jbgd->bgrij", q[block] * since.unsqueeze(3), k[:start] * until)
        steps = (total[block, None] - total[None, block]).clamp(max=0).exp().to(q.dtype)  # i j b g d
        inside = torch.einsum("ibgrd,jbgd,ijbgd->bgrij", q[block], k[block], steps)
        later = inside.new_zeros((*inside.shape[:4], q.size(0) - start - inside.size(4)))
        rows.append(torch.cat((earlier, inside, later), 4))
    return torch.cat(rows, 3)


def _fold(y: Tensor, n: int) -> Tensor:
    """``[t, b, ...]`` as n chunks: ``[chunk, n * b, ...]``, padded with zeros: no key, no decay, no new document."""
    missing = n * _CHUNK - y.size(0)
    y = pad(y, (0, 0) * (y.dim() - 1) + (0, missing)) if missing else y
    return y.unflatten(0, (n, _CHUNK)).transpose(0, 1).flatten(1, 2)


def _unfold(y: Tensor, n: int) -> Tensor:
    return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
