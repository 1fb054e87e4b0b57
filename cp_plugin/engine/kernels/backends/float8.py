"""Reference of FP8 attention on any device: rounds what an FP8 kernel rounds, and computes in float32.

    forward    q, k, v, P, out       e4m3   maximum 448, 3 mantissa bits
    backward   dout, dS, dq, dk, dv  e5m2   maximum 57344, 2 mantissa bits
               q, k, v, P, out'      e4m3

Each tensor of a tile has one power-of-two scale (dq, dk and dv share one), by current or delayed scaling
(``core.scaling``). P is exp(score - row maximum) in the forward pass, divided by its exact sum afterwards, and
exp(score - lse) in the backward; its scale is fixed at 256. Like the kernels, the backward takes delta from a rounded
out, here a stand-in (``fused.out_from_delta``) with a scale of its own.

The oracle of ``te_fp8``: it defines how far FP8 attention may be from exact attention. Slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.core.scaling import (
    E4M3,
    E5M2,
    P_SCALE,
    Scaling,
    bound_of_out,
    bounds,
    elements,
    extent,
    largest,
    scale_for,
)
from cp_plugin.engine.kernels.backends import reference
from cp_plugin.engine.kernels.fused import out_from_delta


@dataclass(frozen=True, slots=True)
class Float8:
    """Attention on float8 values, computed in float32."""

    name: str = "float8"
    in_fp8: ClassVar = True
    oracle: ClassVar = True
    any_diagonal: bool = False
    scaling: Scaling = field(default_factory=Scaling, compare=False)

    def unsupported(self, call: CallInfo) -> str | None:
        if call.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return None
        return f"it accumulates in float32, which is not enough for {call.dtype}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        dtype, bound = q.dtype, bound_of_out(extent(v))
        q, k, v = (self._noted(role, x, E4M3) for role, x in (("q", q), ("k", k), ("v", v)))
        made = reference._scores(q, k, reference._hidden_above(diagonal, q, k), scores)
        top = made.amax(-1, keepdim=True)
        p = reference._probabilities(made, top)
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("bgnqk,kbge->bgnqe", _rounded_probabilities(p), v)
        out = torch.where(total == 0, 0.0, out / total).permute(3, 0, 1, 2, 4).flatten(2, 3)
        return self._noted("out", out, E4M3, bound).to(dtype), reference._rows((top + total.log()).squeeze(-1))

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return out_from_delta(self._rounded("dout", dout, E5M2), delta)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dtypes = k.size(2), (q.dtype, k.dtype, v.dtype)
        rows = q.size(0) * (q.size(2) // groups)
        bound_dp, bound_dqkv = bounds(*map(extent, (dout, q, k, v, term)), rows, scores.scale)
        q, k, v = (self._rounded(role, x, E4M3) for role, x in (("q", q), ("k", k), ("v", v)))
        do, out = self._noted("dout", dout, E5M2), rounded(term, E4M3)
        delta = reference._split_groups((do * out).sum(-1), groups)
        p = reference._probabilities(
            reference._scores(q, k, reference._hidden_above(diagonal, q, k), scores),
            reference._split_groups(lse, groups),
        )
        do = reference._grouped(do, groups)
        ds = self._noted("dp", p * (torch.einsum("qbgne,kbge->bgnqk", do, v) - delta), E5M2, bound_dp)
        dv = torch.einsum("bgnqk,qbgne->kbge", _rounded_probabilities(p), do)
        dq = torch.einsum("bgnqk,kbgd->qbgnd", ds, k).flatten(2, 3) * scores.scale
        dk = torch.einsum("bgnqk,qbgnd->kbgd", ds, reference._grouped(q, groups)) * scores.scale
        grads = (self._noted("dqkv", x, E5M2, bound_dqkv) for x in (dq, dk, dv))
        dq, dk, dv = (x.to(dtype) for x, dtype in zip(grads, dtypes, strict=True))
        return dq, dk, dv

    def _noted(self, role: str, x: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Tensor:
        self.scaling.record(role, largest(x))
        return self._rounded(role, x, dtype, bound)

    def _rounded(self, role: str, x: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Tensor:
        """``bound``: an upper bound, for a tensor whose largest element only a kernel would know."""
        return rounded(x, dtype, self.scaling.scale(role, largest(x) if bound is None else bound, dtype))


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """``x`` rounded to a float8 type with one scale, in float32; default: the scale of its largest element.

    NaN if the largest element is not finite.
    """
    scale = scale_for(largest(x), dtype) if scale is None else scale
    return elements(x, scale, dtype).float() / scale


def _rounded_probabilities(p: Tensor) -> Tensor:
    return (p * P_SCALE).to(E4M3).float() / P_SCALE


BACKEND = Float8()
