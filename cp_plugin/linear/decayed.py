"""Segments whose values are added to a decaying state.

    left              = sum_t  write_t * k_t v_t^T        contribution of the tokens to the state at the segment's end
    through           = product of all decays             decay of the incoming state
    read      o_t    += (read_t * q_t) S                  contribution of the incoming state to the outputs

``read_t`` is the decay from the segment's start to token t, ``write_t`` from token t to its end; both are at most 1, so
nothing overflows. They are 0 across a document boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear import scan
from cp_plugin.linear.tokens import Tokens, by_group, log_decays


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


@dataclass(slots=True)
class Decayed:
    """A ``Segment``."""

    x: Tokens
    edges: Edges = field(init=False)

    def __post_init__(self) -> None:
        self.edges = edges(self.x)

    @property
    def through(self) -> Tensor | None:
        return None if self.edges.through is None else self.edges.through.unsqueeze(-1)

    @property
    def left(self) -> Tensor:
        k, v = (y.to(self._dtype) for y in (self.x.k, self.x.v))
        return torch.einsum("tbgd,tbge->bgde", times(k, self.edges.write), v)

    def read(self, incoming: Tensor) -> Tensor:
        return torch.einsum("tbgrd,bgde->tbgre", self._queries, incoming).flatten(2, 3)

    def read_back(self, dout: Tensor) -> Tensor:
        q = self._queries
        return torch.einsum("tbgrd,tbgre->bgde", q, dout.to(q.dtype).unflatten(2, q.shape[2:4]))

    @property
    def _queries(self) -> Tensor:
        q, weight = by_group(self.x).to(self._dtype), self.edges.read
        return q if weight is None else q * weight.unsqueeze(-2)

    @property
    def _dtype(self) -> torch.dtype:
        return accumulation_dtype(self.x.q.dtype)


def times(y: Tensor, weight: Tensor | None) -> Tensor:
    """``[..., g, d]`` times ``[..., g, x]``."""
    return y if weight is None else y * weight
