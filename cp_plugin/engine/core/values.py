"""Values that travel between ranks: queries, keys and values with their owners, partial results, gradients.

Shapes: s = tokens, b = batch, h = query heads, g = key/value heads (g divides h), d = head size, e = value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Owners = Callable[[int], tuple[int, ...]]
"""rank -> the ranks whose shards a tensor concatenates there, in that order."""


def own(rank: int) -> tuple[int, ...]:
    """Every rank holds its own tokens."""
    return (rank,)


def dense(x: Tensor) -> Tensor:
    """``x`` with a dense last dimension, as kernels need it: itself, or a copy of a view that has none.

    torch's flash attention on the CPU reads such a view as if it were dense, without an error.
    """
    return x if x.size(-1) <= 1 or x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Tensors of the same tokens that travel together. ``kind(*shard.tensors, owners=...)`` rebuilds one."""

    owners: Owners = field(default=own, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, with tokens in dimension 0 and heads in dimension 2."""
        held = (getattr(self, name) for name in self.__slots__)  # of its own class: without owners
        return tuple(t for t in held if t is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Queries(Shard):
    """The query side: queries in the forward pass, plus inputs of their gradient in the backward."""

    q: Tensor
    """``[s, b, h, d]``"""
    dout: Tensor | None = None
    """The gradient of the output, ``[s, b, h, e]``."""
    lse: Tensor | None = None
    """log(sum(exp(scores))) over *all* keys of each query, ``[s, b, h]``, float32 (float64 for float64 inputs)."""
    delta: Tensor | None = None
    """rowsum(dout * out) with the output over all keys; shape and dtype as ``lse``."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyValues(Shard):
    """The key/value side."""

    k: Tensor
    """``[s, b, g, d]``"""
    v: Tensor
    """``[s, b, g, e]``"""


class Partial(NamedTuple):
    """Attention over some of the keys. Rows that saw no key have out 0 and lse -inf."""

    out: Tensor
    """Normalised over the keys seen: the kernel's dtype, or the accumulation dtype once partials were merged."""
    lse: Tensor
    """log(sum(exp(scores))) over the keys seen, float32 (float64 for float64 inputs)."""


class Gradients(NamedTuple):
    """Gradients over some (query, key) pairs, in the kernel's or the accumulation dtype."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class Sums(NamedTuple):
    """Running gradient sums of this rank; None: no sum yet, or not kept here."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None


NO_SUMS = Sums()
