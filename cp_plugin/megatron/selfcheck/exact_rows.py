"""A few rows of one head's attention, exactly, and how far rounding alone may take a kernel's from them.

Everything is computed in float64 from the elements that the kernel was given, some keys at a time: TF32 cannot touch
it, and a million keys need no copy of that width. A row with weights ``p`` over keys, elementwise and to first order:

    softmax   out = sum p v        |error| <= sum p (4u + e) |v|  + |out| sum p e
              dq  = sum ds k       with ds = p (dp - delta), the same of ds: that of p, of dp, and of delta by out's
    linear    out = sum w (q k) v  |error| <= (8u + 4 (d + sqrt(n)) a) sum w |q| |k| |v|,  and dq alike

    u   unit roundoff of the dtype, 2^-8 for bfloat16: a kernel rounds p or ds, each partial result, and the sum
    a   that of the accumulation, 2^-24; on CUDA float32 is multiplied as TF32, and u is 2^-11
        and u for every hop between ranks, where sums of dq travel in the dtype (--cp-gradient-dtype model)
    e   4 (u + d a) |scale| norm(q * k): what rounding a scaled query and adding d products does to a score. Rounding
        errors are taken as independent (Higham and Mary, 2019): 4 times their norm

In float16 a weight or gradient below the smallest number is lost: half of that for each visible key is allowed besides.
Under ``--cp-fp8`` the limit is that of the self-check, for the norm of all elements against the norm of the same bound
with u = a quarter, where a rounding error is as large as what is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """What a kernel rounds to."""

    unit: float
    accumulation: float
    smallest: float
    """What may be lost of a weight."""
    hops: int
    """How often a sum of dq is rounded on its way between ranks."""
    of_norm: float | None = None
    """The limit for norms; None: it is elementwise, and the bound itself."""

    @classmethod
    def of(cls, dtype: torch.dtype, *, cuda: bool, of_norm: float | None = None, hops: int = 0) -> Rounding:
        """Of a kernel for this dtype; ``of_norm``: the limit of FP8."""
        numbers = torch.finfo(dtype)
        accumulation = 2.0**-53 if dtype == torch.float64 else 2.0**-24
        unit = 2.0**-11 if cuda and dtype == torch.float32 else numbers.eps / 2
        unit = unit if of_norm is None else 0.25
        lost = numbers.smallest_normal * numbers.eps
        return cls(unit=unit, accumulation=accumulation, smallest=lost, hops=hops, of_norm=of_norm)


class Exact(NamedTuple):
    """Rows ``[r, e]`` in float64, and the bound on a kernel's error of each element."""

    rows: Tensor
    bound: Tensor


class Verdict(NamedTuple):
    """The element that is furthest beyond its bound, or the norm of all."""

    wrong: Tensor
    """bool ``[r]``."""
    error: Tensor
    allowed: Tensor


def compare(got: Tensor, want: Exact, rounding: Rounding) -> Verdict:
    """A kernel's rows against the exact ones. What is not finite in the exact ones, or would not be in the kernel's
    dtype, is nobody's fault."""
    fair = want.rows.isfinite() & (want.rows.abs() <= torch.finfo(got.dtype).max)
    error = torch.where(fair, (got.double() - want.rows).abs().nan_to_num(nan=torch.inf), 0)
    allowed = torch.where(fair, want.bound, 0)
    if rounding.of_norm is None:
        allowed = allowed + torch.finfo(got.dtype).tiny * torch.finfo(got.dtype).eps
        worst = (error - allowed).argmax()
        return Verdict((error > allowed).any(-1), error.flatten()[worst], allowed.flatten()[worst])
    error, allowed = error.norm(), rounding.of_norm * allowed.norm()
    return Verdict((error > allowed).expand(got.size(0)), error, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """Some rows of softmax attention; made by ``of``."""

    k: Tensor
    v: Tensor
    p: Tensor
    """``[r, n]``."""
    spread: Tensor
    """The error of each score, ``[r, n]``."""
    lost: Tensor
    """What may be lost of each weight, ``[r, n]``."""
    lse: Tensor
    scale: float
    rounding: Rounding

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, *, scale: float, sink: Tensor | None, rounding: Rounding
    ) -> Softmax:
        """q ``[r, d]``, k ``[n, d]``, v ``[n, e]`` as the kernel has them, hidden: bool ``[r, n]``, sink: a number."""
        q = q.double()
        scores, spread = (torch.cat(parts, 1) for parts in zip(*(_scores(q, part) for part in _wide(k)), strict=True))
        scores = (scale * scores).masked_fill(hidden, -torch.inf)
        beside = scores.new_empty(q.size(0), 0) if sink is None else sink.double().expand(q.size(0), 1)
        every = torch.cat((scores, beside), 1)
        lse = every.logsumexp(1, keepdim=True)
        unit = 4 * (rounding.unit + q.size(1) * rounding.accumulation)
        lost = (every.amax(1, keepdim=True) - lse).exp() * rounding.smallest / 2
        return cls(
            k=k,
            v=v,
            p=(scores - lse).exp(),
            spread=unit * abs(scale) * spread,
            lost=lost.masked_fill(hidden, 0),
            lse=lse,
            scale=scale,
            rounding=rounding,
        )

    def out(self) -> Exact:
        """``[r, e]``."""
        u, a = self.rounding.unit, self.rounding.accumulation
        relative = 4 * u + 4 * self.p.size(1) ** 0.5 * a + self.spread
        out, bound = _product(self.p, self.v, self.p * relative + self.lost)
        return Exact(out, bound + out.abs() * (self.p * self.spread).sum(1, keepdim=True))

    def dq(self, dout: Tensor) -> Exact:
        """dout ``[r, e]`` -> ``[r, d]``."""
        u, a = self.rounding.unit, self.rounding.accumulation
        out, dout = self.out(), dout.double()
        parts = [(dout @ part.T, dout.abs() @ part.abs().T) for part in _wide(self.v)]
        dp, size = (torch.cat(found, 1) for found in zip(*parts, strict=True))
        delta = (dout * out.rows).sum(1, keepdim=True)
        beside = (dout.abs() * out.bound).sum(1, keepdim=True)
        relative = (4 + self.rounding.hops) * u + 4 * self.p.size(1) ** 0.5 * a + self.spread
        relative = relative + (self.p * self.spread).sum(1, keepdim=True) + 4 * a * (1 + self.lse.abs())
        around = self.p * (relative * (dp.abs() + delta.abs()) + 4 * dout.size(1) ** 0.5 * a * size + beside)
        lost = self.lost * (dp.abs() + delta.abs()) + (self.lost > 0) * self.rounding.smallest / 2
        dq, bound = _product(self.p * (dp - delta), self.k, around + lost)
        return Exact(self.scale * dq, abs(self.scale) * bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Some rows of causal linear attention."""

    q: Tensor
    """``[r, d]``."""
    k: Tensor
    """``[n, d]``."""
    v: Tensor
    """``[n, e]``."""
    seen: Tensor
    """bool ``[r, n]``."""
    decay_of_rows: Tensor
    """The sum of log decays up to and with each row's token: ``[r, 1]`` or ``[r, d]``."""
    decay: Tensor
    """That of each key: ``[n, 1]`` or ``[n, d]``."""
    scale: float
    rounding: Rounding

    def out(self) -> Exact:
        """``[r, e]``."""
        return self._summed(self.q, lambda q, keys, values: torch.einsum("rd,rnd,ne->re", q, keys, values))

    def dq(self, dout: Tensor) -> Exact:
        """dout ``[r, e]`` -> ``[r, d]``."""
        return self._summed(dout, lambda dout, keys, values: torch.einsum("re,ne,rnd->rd", dout, values, keys))

    def _summed(self, x: Tensor, product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Exact:
        """The sum over all keys of what is linear in x, the decayed keys and the values."""
        x = self.scale * x.double()
        parts = [(product(x, k, v), product(x.abs(), k.abs(), v.abs())) for k, v in self._decayed()]
        rows, bound = (torch.stack(found).sum(0) for found in zip(*parts, strict=True))
        n, d = self.k.shape
        relative = 8 * self.rounding.unit + 4 * (d + n**0.5) * self.rounding.accumulation
        lost = self.rounding.smallest / 2 * self.k.double().abs().sum()
        return Exact(rows, relative * bound + lost)

    def _decayed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Some keys at a time: ``[r, part, d]``, zero where they are not seen, and their values ``[part, e]``."""
        length = max(1, _CHUNK // (self.seen.size(0) * self.k.size(1)))
        parts = zip(*(x.split(length) for x in (self.k, self.v, self.decay, self.seen.T)), strict=True)
        for k, v, decay, seen in parts:
            since = (self.decay_of_rows[:, None] - decay).clamp(max=0)
            yield since.exp() * k.double() * seen.T[..., None], v.double()


def _scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q @ k.T, (q.square() @ k.square().T).sqrt()


def _product(weights: Tensor, x: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """``weights @ x``, and ``bound @ |x|``: x ``[n, d]`` in any dtype."""
    lengths = [part.size(0) for part in _wide(x)]
    parts = zip(weights.split(lengths, 1), bound.split(lengths, 1), _wide(x), strict=True)
    products = [(w @ part, b @ part.abs()) for w, b, part in parts]
    rows, bounds = (torch.stack(found).sum(0) for found in zip(*products, strict=True))
    return rows, bounds


def _wide(x: Tensor) -> Iterator[Tensor]:
    """``[n, d]`` in float64, in parts."""
    for part in x.split(max(1, _CHUNK // x.size(1))):
        yield part.double()
