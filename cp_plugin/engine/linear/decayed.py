"""Segments whose values are added to a decaying state.

    left              = sum_t  write_t * k_t v_t^T        contribution of the tokens to the state at the segment's end
    factor            = product of all decays             decay of the incoming state
    read      o_t    += (read_t * q_t) S                  contribution of the incoming state to the outputs

``read_t`` is the decay from the segment's start to token t, ``write_t`` from token t to its end; both are at most 1, so
nothing overflows. They are 0 across a document boundary.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.linear import scan
from cp_plugin.engine.linear.products import run_slabs, scores
from cp_plugin.engine.linear.segment import Segment, advance
from cp_plugin.engine.linear.tokens import Tokens, fold, group_queries, log_decays, unfold


class Edges(NamedTuple):
    """Decays between tokens and the ends of their segment, 0 across documents; None where all are 1."""

    read: Tensor | None
    """``[t, b, g, x]``: from the start through each token."""
    write: Tensor | None
    """``[t, b, g, x]``: from after each token to the end."""
    factor: Tensor | None
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


class Decayed(Segment):
    """A segment whose values are added."""

    def _build(self) -> None:
        self.edges = edges(self.x)

    @property
    def factor(self) -> Tensor | None:
        return None if self.edges.factor is None else self.edges.factor.unsqueeze(-1)

    @property
    def left(self) -> Tensor:
        dtype = accumulation_dtype(self.x.q.dtype)
        k, v = self.x.k.to(dtype), self.x.v.to(dtype)
        return torch.einsum("tbgd,tbge->bgde", times(k, self.edges.write), v)

    @property
    def queries(self) -> Tensor:
        q, weight = group_queries(self.x).to(accumulation_dtype(self.x.q.dtype)), self.edges.read
        return q if weight is None else q * weight.unsqueeze(-2)


def times(y: Tensor, weight: Tensor | None) -> Tensor:
    """``[..., g, d]`` times ``[..., g, x]``."""
    return y if weight is None else y * weight


def forward(x: Tokens) -> Tensor:
    """Causal linear attention of each segment from a zero state, chunk by chunk; as ``segment.Forward``."""
    t, b = x.q.shape[:2]
    chunks = x.each(fold)
    n = chunks.q.size(1) // b
    each = Decayed(chunks)
    factor = None if each.factor is None else each.factor.unflatten(0, (n, -1))
    incoming = scan.states(each.left.unflatten(0, (n, -1)), factor)[:-1]
    within = run_slabs(_attend_within, chunks, partial(torch.cat, dim=1))
    return unfold(within + each.read(incoming.flatten(0, 1)), n)[:t]


def run(x: Tokens, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs and the state after the segment, as ``segment.Run``."""
    segment, out = Decayed(x), forward(x)
    if initial is None:
        return out, segment.left
    return out + segment.read(initial), advance(initial, segment.left, segment.factor)


def _attend_within(x: Tokens) -> Tensor:
    """Causal attention within each chunk: ``[t, b, h, e]``."""
    dtype = accumulation_dtype(x.q.dtype)
    q, k, v = group_queries(x).to(dtype), x.k.to(dtype), x.v.to(dtype)
    return torch.einsum("bgrij,jbge->ibgre", scores(q, k, x), v).flatten(2, 3)
