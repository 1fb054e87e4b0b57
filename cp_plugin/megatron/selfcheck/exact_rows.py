"""Exact attention rows in float64, with a bound on the rounding error of a kernel's rows.

Computed in float64 from the elements that the kernel was given, some keys at a time: immune to TF32, and long sequences
need no wide copy. A row with weights ``p`` over keys, elementwise and to first order:

    softmax   out = sum p v        |error| <= sum p (4u + e) |v|  + |out| sum p e
              dq  = sum ds k       with ds = p (dp - delta); likewise, with the errors of p, dp and delta (from out)
    linear    out = sum w (q k) v  |error| <= 8u (norm(w q k v) + norm(q S) + |out|) + 4 (d + sqrt(n)) a sum |w q k v|
              and dq alike; S: the state, of which a kernel may keep a rounded copy

    u   unit roundoff of the dtype, 2^-8 for bfloat16: a kernel rounds p or ds, each partial result, and the sum
    a   unit roundoff of the accumulation, 2^-24; on CUDA float32 is multiplied as TF32, and u is 2^-11
        plus u for every hop between ranks on which sums of dq travel in the dtype (--cp-gradient-dtype model)
    e   4 (u + d a) |scale| norm(q * k): error of a score from rounding a scaled query and adding d products, with
        independent rounding errors (Higham and Mary, 2019): 4 times their norm

In float16 a weight or gradient below the smallest number is lost: half of that is allowed for each visible key.
Under ``--cp-fp8`` the limit is the self-check's, for the norm of all elements relative to the norm of the same bound
with u = 1/4, where a rounding error is as large as the rounded value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.linear import rules
from cp_plugin.engine.linear.tokens import Tokens

_CHUNK = 1 << 22
_SLAB = 1 << 13
"""Tokens of which states are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """A kernel's rounding."""

    unit: float
    accumulation: float
    smallest: float  # smallest number: what a weight may lose
    hops: int  # roundings of a sum of dq between ranks
    of_norm: float | None = None  # limit for norms (FP8); None: the bound applies elementwise

    @classmethod
    def from_dtype(cls, dtype: torch.dtype, *, cuda: bool, of_norm: float | None = None, hops: int = 0) -> Rounding:
        """The rounding of a kernel for this dtype."""
        numbers = torch.finfo(dtype)
        accumulation = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        unit = 2.0**-11 if cuda and dtype == torch.float32 else numbers.eps / 2
        unit = unit if of_norm is None else 0.25
        lost = numbers.smallest_normal * numbers.eps
        return cls(unit=unit, accumulation=accumulation, smallest=lost, hops=hops, of_norm=of_norm)


class Exact(NamedTuple):
    """Rows ``[r, e]`` in float64 and the bound on each element's error."""

    rows: Tensor
    bound: Tensor


class Verdict(NamedTuple):
    """The element furthest beyond its bound, or the norm of all."""

    wrong: Tensor  # bool ``[r]``
    error: Tensor
    allowed: Tensor


def compare(got: Tensor, want: Exact, rounding: Rounding) -> Verdict:
    """Compare a kernel's rows with the exact ones; elements beyond the range of the kernel's dtype are ignored."""
    fair = want.rows.isfinite() & (want.rows.abs() <= torch.finfo(got.dtype).max)
    error = torch.where(fair, (got.double() - want.rows).abs().nan_to_num(nan=torch.inf), 0)
    allowed = torch.where(fair, want.bound, 0)
    if rounding.of_norm is None:
        allowed = allowed + torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
        worst = (error - allowed).argmax()
        return Verdict((error > allowed).any(-1), error.flatten()[worst], allowed.flatten()[worst])
    error, allowed = error.norm(), rounding.of_norm * allowed.norm()
    return Verdict((error > allowed).expand(got.size(0)), error, allowed)


class Softmax:
    """Rows of softmax attention.

    p, spread, lost: weights, errors of the scores, and underflow of the weights, ``[r, n]``.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, made: Scores, *, sink: Tensor | None, rounding: Rounding
    ) -> None:
        """q ``[r, d]``, k ``[n, d]``, v ``[n, e]`` as the kernel has them, hidden: bool ``[r, n]``, sink: scalar."""
        self.k, self.v, self.rounding, scale = k, v, rounding, made.scale
        q = q.double()
        columns = [(q @ part.T, (q.square() @ part.square().T).sqrt()) for part in _wide(k)]
        scores, spread = (torch.cat(chunks, 1) for chunks in zip(*columns, strict=True))
        scores, slope = scale * scores, torch.ones_like(scores)
        if made.softcap is not None:
            tangent = (scores / made.softcap).tanh()
            scores, slope = made.softcap * tangent, 1 - tangent.square()
        self.slope = scale * slope  # of a score by the product of query and key
        self.bent = 0.0 if made.softcap is None else 2 / made.softcap  # the slope's relative change by an error of 1
        scores = scores.masked_fill(hidden, -torch.inf)
        with_sink = scores if sink is None else torch.cat((scores, sink.double().expand(q.size(0), 1)), 1)
        self.lse = with_sink.logsumexp(1, keepdim=True)
        self.p = (scores - self.lse).exp()
        self.spread = 4 * (rounding.unit + q.size(1) * rounding.accumulation) * abs(scale) * spread
        lost = (with_sink.amax(1, keepdim=True) - self.lse).exp() * rounding.smallest / 2
        self.lost = lost.masked_fill(hidden, 0)

    def output(self) -> Exact:
        """``[r, e]``."""
        u, a = self.rounding.unit, self.rounding.accumulation
        relative = 4 * u + 4 * self.p.size(1) ** 0.5 * a + self.spread
        out, bound = _product(self.p, self.v, self.p * relative + self.lost)
        return Exact(out, bound + out.abs() * (self.p * self.spread).sum(1, keepdim=True))

    def dq(self, dout: Tensor) -> Exact:
        """dout ``[r, e]`` -> ``[r, d]``."""
        u, a = self.rounding.unit, self.rounding.accumulation
        out, dout = self.output(), dout.double()
        parts = [(dout @ part.T, dout.abs() @ part.abs().T) for part in _wide(self.v)]
        dp, size = (torch.cat(chunks, 1) for chunks in zip(*parts, strict=True))
        delta = (dout * out.rows).sum(1, keepdim=True)
        beside = (dout.abs() * out.bound).sum(1, keepdim=True)
        relative = (4 + self.rounding.hops) * u + 4 * self.p.size(1) ** 0.5 * a + self.spread
        relative = relative + (self.p * self.spread).sum(1, keepdim=True) + 4 * a * (1 + self.lse.abs())
        around = self.p * (relative * (dp.abs() + delta.abs()) + 4 * dout.size(1) ** 0.5 * a * size + beside)
        lost = self.lost * (dp.abs() + delta.abs()) + (self.lost > 0) * self.rounding.smallest / 2
        slope = self.slope.abs() * (1 + self.bent * self.spread)
        around = slope * (around + lost) + (slope * self.spread + 4 * a) * self.bent * self.p * (dp.abs() + delta.abs())
        return Exact(*_product(self.slope * self.p * (dp - delta), self.k, around))


class Linear:
    """Rows of causal linear attention, also under the delta rule: each from the state after its token.

    The bound is that without a delta rule, which only takes from the state.
    """

    def __init__(self, x: Tokens, q: Tensor, at: Sequence[int], *, scale: float, rounding: Rounding) -> None:
        """x: the whole sequence of one head; q ``[r, d]``; at: the rows' tokens."""
        self.q, self.tokens, self.scale, self.rounding = q, len(x.k), scale, rounding
        k, v = (y.double().abs() for y in (x.k, x.v))
        self.lost = rounding.smallest / 2 * k.sum()
        written = k if x.beta is None else k * x.beta[..., None].abs()
        added = x._replace(q=k, k=written, v=v, beta=None)
        twice = None if x.log_decay is None else 2 * x.log_decay
        squared = added._replace(k=written.square(), v=v.square(), log_decay=twice)
        self.states, self.magnitudes, squares = (_states(y, at) for y in (x, added, squared))
        self.squares = squares + self.states.square()

    def output(self) -> Exact:
        """``[r, e]``."""
        return self._read("rd,rde->re", self.q)

    def dq(self, dout: Tensor) -> Exact:
        """dout ``[r, e]`` -> ``[r, d]``."""
        return self._read("re,rde->rd", dout)

    def _read(self, product: str, x: Tensor) -> Exact:
        x = self.scale * x.double()
        rows = torch.einsum(product, x, self.states)
        spread = torch.einsum(product, x.square(), self.squares).sqrt() + rows.abs()
        summed = (self.q.size(1) + self.tokens**0.5) * torch.einsum(product, x.abs(), self.magnitudes)
        return Exact(rows, 8 * self.rounding.unit * spread + 4 * self.rounding.accumulation * summed + self.lost)


def _states(x: Tokens, at: Sequence[int]) -> Tensor:
    """The states of one head, in float64, after these tokens: ``[r, d, e]``."""
    x = x.each(lambda y: y if y.dtype == torch.bool else y.double())
    state = x.k.new_zeros(1, 1, x.k.size(3), x.v.size(3))
    ends = sorted({0, *(token + 1 for token in at), *range(_SLAB, max(at), _SLAB)})
    by_end = {}
    for start, stop in pairwise(ends):
        _, state = rules.run(x.select(slice(start, stop)), state)
        by_end[stop] = state[0, 0]
    return torch.stack([by_end[token + 1] for token in at])


def _product(weights: Tensor, x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """``weights @ x`` and ``bound @ |x|``: x ``[n, d]`` in any dtype."""
    lengths = [part.size(0) for part in _wide(x)]
    parts = zip(weights.split(lengths, 1), bound.split(lengths, 1), _wide(x), strict=True)
    products = [(w @ part, b @ part.abs()) for w, b, part in parts]
    rows, bounds = (torch.stack(chunks).sum(0) for chunks in zip(*products, strict=True))
    return rows, bounds


def _wide(x: Tensor) -> Iterator[Tensor]:
    """``[n, d]`` in float64, in chunks."""
    for part in x.split(max(1, _CHUNK // x.size(1))):
        yield part.double()
