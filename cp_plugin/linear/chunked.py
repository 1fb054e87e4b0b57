r"""Chunked linear attention in plain torch: quadratic within a chunk, chunk states between chunks.

    chunk 0 [\ ]          within a chunk     (q k^T * decay, causal) v
    chunk 1 [#][\ ]       between chunks     by the algebra of ``segment``, as between ranks
    chunk 2 [#][#][\ ]

Forward and backward hold the products of one slab of chunks at a time; other memory is proportional to the tokens and
the states between chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear import delta, scan, segment
from cp_plugin.linear.decayed import Decayed
from cp_plugin.linear.products import chunks_at_a_time, scores
from cp_plugin.linear.tokens import Tokens, by_group, in_chunks, slabs, unfold


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state: ``[t, b, h, e]`` in the accumulation dtype."""
    if x.beta is not None:
        return delta.forward(x)
    t, b = x.q.shape[:2]
    chunks = in_chunks(x)
    n = chunks.q.size(1) // b
    each = Decayed(chunks)
    through = None if each.through is None else each.through.unflatten(0, (n, -1))
    incoming = scan.states(each.left.unflatten(0, (n, -1)), through)[:-1]
    return unfold(_in_slabs(chunks) + each.read(incoming.flatten(0, 1)), n)[:t]


def extend(x: Tokens, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Continue a sequence in generation: outputs and the new state, in the accumulation dtype.

    before: the state after all earlier tokens, ``[b, g, d, e]``; None at the start.
    """
    if x.beta is not None:
        return delta.Delta(x).run(before)
    here, out = segment.of(x), forward(x)
    if before is None:
        return out, here.left
    return out + here.read(before), segment.after(before, here.left, here.through)


def _in_slabs(x: Tokens) -> Tensor:
    """``_within`` for a limited number of chunks at a time."""
    size = chunks_at_a_time(x)
    return _within(x) if size >= x.q.size(1) else _Slabs.apply(size, *x)


class _Slabs(torch.autograd.Function):
    """Saves only the tokens; the backward recomputes each slab."""

    @staticmethod
    def forward(ctx: Any, size: int, *tokens: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tokens)
        ctx.size = size
        return torch.cat([_within(slab) for slab in slabs(Tokens(*tokens), size)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x = Tokens(*ctx.saved_tensors)
        each = zip(dout.split(ctx.size, 1), slabs(x, ctx.size), strict=True)
        found = [segment.recomputed(_within, *slab) for slab in each]
        grads = [torch.cat(parts, 1) for parts in zip(*found, strict=True)]
        return None, *grads, *(None,) * (len(x) - len(grads))


def _within(x: Tokens) -> Tensor:
    """Causal attention within each chunk: ``[t, b, h, e]``."""
    dtype = accumulation_dtype(x.q.dtype)
    q, k, v = by_group(x).to(dtype), x.k.to(dtype), x.v.to(dtype)
    return torch.einsum("bgrij,jbge->ibgre", scores(q, k, x), v).flatten(2, 3)
