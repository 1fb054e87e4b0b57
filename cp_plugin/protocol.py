"""The interfaces everything is composed of.

**A context-parallel method has the same interface as the attention kernel it distributes** (``Attend``), so methods
wrap kernels, and each other. A ``Provider`` is what a method file registers: a name, its mesh axes, how to build it,
what it cannot do and what it sends.

Shapes: s = local tokens, b = batch, h = query heads, g = key/value heads (g divides h), d = head size, e = value head
size.

    q [s, b, h, d]    k [s, b, g, d]    v [s, b, g, e]    out, dout [s, b, h, e]    lse, delta [s, b, h]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cp_plugin.mesh import Mesh

At = tuple[int, ...]
"""Whose tokens a tensor holds: the numbers of the ranks whose shards it concatenates, in that order; usually one."""


class Partial(NamedTuple):
    """Attention over some of the keys. Rows that saw no key have out 0 and lse -inf."""

    out: Tensor
    """Normalised over the keys seen: the kernel's dtype, or the accumulation dtype once partials were merged."""
    lse: Tensor
    """log(sum(exp(scores))) over the keys seen, float32 (float64 for float64 inputs)."""


class Gradients(NamedTuple):
    """Gradients over some of the (query, key) pairs, in the kernel's or in the accumulation dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Attend(Protocol):
    """Attention of a query shard over a key/value shard: one kernel, or a method that moves shards between kernels.

    ``None`` means that no query of the block sees any key of it: there is nothing to merge or to add.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At) -> Partial | None: ...

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
        """Gradients from the *global* ``lse`` and ``delta = rowsum(dout * out)`` of each query, not the block's own."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user chose, besides the provider's name. None: the provider's default."""

    layout: str | None = None
    backend: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One attention call, as a provider sees it when it says what it cannot do and what it will send."""

    seq_length: int
    """Global tokens."""
    size: int
    """Context-parallel ranks."""
    heads: int
    """Query heads on this rank (after tensor parallelism)."""
    kv_heads: int
    head_dim: int
    v_head_dim: int
    batch: int
    dtype: torch.dtype
    causal: bool

    @property
    def kv_elements(self) -> int:
        """Elements of one rank's k and v together."""
        return self.seq_length // self.size * self.batch * self.kv_heads * (self.head_dim + self.v_head_dim)


Formula = Mapping[tuple[str, str], int]
"""(phase, axis) -> bytes each rank sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A context-parallel method under the name users give. Method files list theirs in ``PROVIDERS``."""

    name: str
    summary: str
    """One line, with the paper."""
    layouts: tuple[str, ...]
    """Token layouts it supports; the first is the default."""
    axes: Callable[[int, Options], dict[str, int]]
    """(context-parallel size, options) -> mesh axes, slowest first; ValueError for options that do not fit."""
    build: Callable[[Mesh, Attend, Options], Attend]
    """(mesh, the local kernel, options) -> the method."""
    traffic: Callable[[Problem, Options], Formula]
    """The closed formula for the bytes each rank sends per call; a test holds it equal to the ledger."""
    unsupported: Callable[[Problem], str | None] = lambda problem: None
    """The reason why it cannot do this problem, or None."""
