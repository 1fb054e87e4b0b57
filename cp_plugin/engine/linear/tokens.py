"""``Tokens``: the inputs of linear attention on segments of equal length.

Shapes in this folder: t tokens of a segment, b batch (including the segments of one rank), h query heads, r = h / g of
them for each of g key/value heads, d key size, e value size; ``x`` is 1 for one decay per head, d for one per key
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.core.dtypes import accumulation_dtype

CHUNK = 64
"""Tokens of a chunk."""
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
    beta: Tensor | None = None
    """``[t, b, g]``: the share of the value under a key that the delta rule replaces; None: values are added."""
    starts: Tensor | None = None
    """bool ``[t, b]``: first token of a document, which sees no state; None: a single document."""

    @property
    def differentiable(self) -> tuple[Tensor, ...]:
        """All that have a gradient: q, k, v, then the log decay and beta, if any."""
        return tuple(y for y in self[:5] if y is not None)

    def each(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """The same with every tensor changed."""
        return Tokens(*(None if y is None else change(y) for y in self))

    def select(self, places: slice) -> Tokens:
        """Some of the tokens."""
        return self.each(itemgetter(places))


def tokens_of(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, beta: Tensor | None = None) -> Tokens:
    """Tokens from the arguments of a call, whose log decay is ``[g]``, ``[t, b, g]`` or ``[t, b, g, d]``."""
    if log_decay is not None:
        log_decay = log_decay.expand(*k.shape[:3]) if log_decay.dim() == 1 else log_decay
        log_decay = log_decay.unsqueeze(3) if log_decay.dim() == 3 else log_decay
    return Tokens(q, k, v, log_decay, beta)


def group_queries(x: Tokens) -> Tensor:
    """q as ``[t, b, g, r, d]``."""
    return x.q.unflatten(2, (x.k.size(2), -1))


def log_decays(x: Tokens) -> Tensor:
    """``[t, b, g, x]`` in the accumulation dtype, finite; zeros if there is no decay."""
    dtype = accumulation_dtype(x.q.dtype)
    if x.log_decay is None:
        return x.k.new_zeros((*x.k.shape[:3], 1), dtype=dtype)
    return x.log_decay.to(dtype).clamp(min=_STRONGEST)


def fold(y: Tensor) -> Tensor:
    """``[t, b, ...]`` as n chunks, chunk by chunk in the batch: ``[CHUNK, n * b, ...]``, padded with zeros.

    Tokens that are missing have no key and no decay, and begin no document.
    """
    n = -(-y.size(0) // CHUNK)
    missing = n * CHUNK - y.size(0)
    y = pad(y, (0, 0) * (y.dim() - 1) + (0, missing)) if missing else y
    return y.unflatten(0, (n, CHUNK)).transpose(0, 1).flatten(1, 2)


def slabs(x: Tokens, size: int) -> list[Tokens]:
    """The tokens, ``size`` segments at a time."""
    parts = (repeat(None) if y is None else y.split(size, 1) for y in x)
    return [Tokens(*of_slab) for of_slab in zip(*parts, strict=False)]


def unfold(y: Tensor, n: int) -> Tensor:
    """The inverse for n chunks, without dropping what was added: ``[n * CHUNK, b, ...]``."""
    return y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
