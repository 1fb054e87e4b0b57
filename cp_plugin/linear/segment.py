"""Segment algebra of linear attention: how tokens change the state, and how the state changes outputs.

    state     M       = sum_t  write_t * k_t v_t^T        contribution of the tokens to the state at the segment's end
    through           = product of all decays             decay of the incoming state
    read      o_t    += (read_t * q_t) S                  contribution of the incoming state to the outputs

``read_t`` is the decay from the segment's start to token t, ``write_t`` from token t to its end; both are at most 1, so
nothing overflows. They are 0 across a document boundary.

Shapes: t tokens of a segment, b batch (including the segments of one rank), h query heads, g key/value heads, d key
size, e value size; ``x`` is 1 for one decay per head, d for one per key dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear import scan

_STRONGEST = -1e4
"""exp of this is 0 and its sums stay finite, so a decay of exactly 0 is allowed."""


class Tokens(NamedTuple):
    """Inputs of linear attention on segments of equal length."""

    q: Tensor
    """``[t, b, h, d]``"""
    k: Tensor
    """``[t, b, g, d]``"""
    v: Tensor
    """``[t, b, g, e]``"""
    log_decay: Tensor | None = None
    """``[t, b, g, x]``, <= 0; None: no decay."""
    starts: Tensor | None = None
    """bool ``[t, b]``: first token of a document, which sees no state; None: a single document."""


class Edges(NamedTuple):
    """Decays between tokens and the ends of their segment, 0 across documents; None where all are 1."""

    read: Tensor | None
    """``[t, b, g, x]``: from the start through each token."""
    write: Tensor | None
    """``[t, b, g, x]``: from after each token to the end."""
    through: Tensor | None
    """``[b, g, x]``: from the start to the end."""


def edges(x: Tokens) -> Edges:
    """Exponentials of sums of log decays, in the accumulation dtype.

    Sums only add, from either end: a difference would have the error of the larger sum. Terms of one sign give a small
    relative error (``scan.sums``), and ``exp(s)`` one of at most |s| times that: negligible where s is near 0,
    and where |s| is large ``exp(s)`` vanishes.
    """
    if x.log_decay is None and x.starts is None:
        return Edges(None, None, None)
    decay = log_decays(x)
    total = scan.sums(decay)
    later = scan.sums(decay[1:].flip(0)).flip(0)
    read, write, whole = total.exp(), torch.cat((later.exp(), torch.ones_like(decay[:1]))), total[-1].exp()
    if x.starts is not None:
        documents = x.starts.cumsum(0)[..., None, None]
        read = read * (documents == 0)
        write = write * (documents == documents[-1])
        whole = whole * (documents[-1] == 0)
    return Edges(read, write, whole)


def log_decays(x: Tokens) -> Tensor:
    """``[t, b, g, x]`` in the accumulation dtype, finite; zeros if there is no decay."""
    dtype = accumulation_dtype(x.q.dtype)
    if x.log_decay is None:
        return x.k.new_zeros((*x.k.shape[:3], 1), dtype=dtype)
    return x.log_decay.to(dtype).clamp(min=_STRONGEST)


def state(x: Tokens, write: Tensor | None) -> Tensor:
    """Contribution of the tokens to the state: ``[b, g, d, e]`` in the accumulation dtype."""
    dtype = accumulation_dtype(x.q.dtype)
    return torch.einsum("tbgd,tbge->bgde", times(x.k.to(dtype), write), x.v.to(dtype))


def read(x: Tokens, weight: Tensor | None, incoming: Tensor) -> Tensor:
    """Contribution of the incoming state ``[b, g, d, e]`` to the outputs: ``[t, b, h, e]`` in the accumulation
    dtype."""
    q = times_heads(by_group(x).to(incoming.dtype), weight)
    return torch.einsum("tbgrd,bgde->tbgre", q, incoming).flatten(2, 3)


def read_back(x: Tokens, weight: Tensor | None, dout: Tensor) -> Tensor:
    """Gradient of the incoming state, the transpose of ``read``: ``[b, g, d, e]``."""
    dtype = accumulation_dtype(x.q.dtype)
    q = times_heads(by_group(x).to(dtype), weight)
    return torch.einsum("tbgrd,tbgre->bgde", q, dout.to(dtype).unflatten(2, q.shape[2:4]))


def after(incoming: Tensor, left: Tensor, through: Tensor | None = None) -> Tensor:
    """The state after a segment: ``through * incoming + left``."""
    return incoming + left if through is None else through.unsqueeze(-1) * incoming + left


def by_group(x: Tokens) -> Tensor:
    """q as ``[t, b, g, h / g, d]``."""
    return x.q.unflatten(2, (x.k.size(2), -1))


def times(y: Tensor, weight: Tensor | None) -> Tensor:
    """``[..., g, d]`` times ``[..., g, x]``."""
    return y if weight is None else y * weight


def times_heads(y: Tensor, weight: Tensor | None) -> Tensor:
    """``[..., g, r, d]`` times ``[..., g, x]``."""
    return y if weight is None else y * weight.unsqueeze(-2)


def recomputed(forward: Callable[[Tokens], Tensor], dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and the log decay, if any, by recomputing the forward."""
    with torch.enable_grad():
        x, leaves = detached(x)
        out = forward(x)
        return gradients((out * dout.to(out.dtype)).sum(), leaves)


def detached(x: Tokens) -> tuple[Tokens, list[Tensor]]:
    """The tokens as autograd leaves, and the leaves that have gradients."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in x[:4]]
    return Tokens(*leaves, x.starts), [leaf for leaf in leaves if leaf is not None]


def at_edges(dout: Tensor, x: Tokens, incoming: Tensor, outgoing: Tensor) -> tuple[Tensor, ...]:
    """Gradients through the incoming and the outgoing state; ``outgoing`` is the latter's gradient."""
    with torch.enable_grad():
        x, leaves = detached(x)
        decays = edges(x)
        added = read(x, decays.read, incoming)
        left = after(incoming, state(x, decays.write), decays.through)
        return gradients((added * dout.to(added.dtype)).sum() + (left * outgoing).sum(), leaves)


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a scalar with respect to all leaves; zeros for unused ones."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
