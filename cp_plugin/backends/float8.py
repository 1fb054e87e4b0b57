"""The numerics of FP8 attention on any device: what an FP8 kernel rounds is rounded, and computed on in float32.

    forward    q, k, v, P, out       e4m3   448 is the largest, 3 bits of mantissa
    backward   dout, dS, dq, dk, dv  e5m2   57344 is the largest, 2 bits
               q, k, v, P, out'      e4m3

One scale for each tensor of a tile (Transformer Engine's per-tensor scaling, taken from the tensor itself): the
largest power of two that keeps its elements in range. P is exp(score - the row's largest) in the forward, divided by
its exact sum afterwards, and exp(score - lse) in the backward; both are 1 at most and have the fixed scale 256. As in
the kernels the backward takes delta from a rounded out, here a stand-in for it (``cp_plugin.backends.stand_in``).

It is the oracle of ``te_fp8``: it says how far FP8 attention may be from exact attention. It is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_plugin.backends.reference import _grouped, _per_group, _probabilities, _rows, _scores
from cp_plugin.backends.stand_in import out_from_delta

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
P_SCALE = 256.0
"""Of probabilities: the largest power of two by which 1 stays in range of e4m3."""


@dataclass(frozen=True, slots=True)
class Float8:
    """Attention on float8 values, computed in float32."""

    name: str = "float8"
    any_diagonal: bool = False

    def unsupported(self, device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> str | None:
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return None
        return f"its sums are float32, which is not enough for {dtype}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scale: float) -> tuple[Tensor, Tensor]:
        scores = _scores(rounded(q, E4M3), rounded(k, E4M3), diagonal, scale)
        largest = scores.amax(-1, keepdim=True)
        p = _probabilities(scores, largest)
        total = p.sum(-1, keepdim=True)
        out = torch.einsum("bgnqk,kbge->bgnqe", _rounded_probabilities(p), rounded(v, E4M3))
        out = torch.where(total == 0, 0.0, out / total).permute(3, 0, 1, 2, 4).flatten(2, 3)
        return rounded(out, E4M3).to(q.dtype), _rows((largest + total.log()).squeeze(-1))

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return out_from_delta(rounded(dout, E5M2), delta)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, row_term: Tensor, diagonal: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, dtypes = k.size(2), (q.dtype, k.dtype, v.dtype)
        q, k, v, out = (rounded(x, E4M3) for x in (q, k, v, row_term))
        do = rounded(dout, E5M2)
        delta = _per_group((do * out).sum(-1), groups)
        p = _probabilities(_scores(q, k, diagonal, scale), _per_group(lse, groups))
        do = _grouped(do, groups)
        ds = rounded(p * (torch.einsum("qbgne,kbge->bgnqk", do, v) - delta), E5M2)
        dv = torch.einsum("bgnqk,qbgne->kbge", _rounded_probabilities(p), do)
        dq = torch.einsum("bgnqk,kbgd->qbgnd", ds, k).flatten(2, 3) * scale
        dk = torch.einsum("bgnqk,qbgnd->kbgd", ds, _grouped(q, groups)) * scale
        dq, dk, dv = (rounded(x, E5M2).to(dtype) for x, dtype in zip((dq, dk, dv), dtypes, strict=True))
        return dq, dk, dv


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as a float8 tensor of one scale has it, in float32. NaN where the largest element is not finite."""
    x = x.float()
    scale = scale_for(x.abs().amax(), dtype)
    return (x * scale).to(dtype).float() / scale


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two, from 2^-100 to 2^100, by which nothing leaves the range of a float8 type.

    largest: the largest absolute value, float32. A scale for 0 is 1; of what is not finite it is NaN.
    """
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / largest)).clamp(-100, 100)
    scale = torch.exp2(exponent)
    scale = torch.where(largest * scale > torch.finfo(dtype).max, scale / 2, scale)  # log2 may be off by rounding
    return torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scale, torch.nan))


def _rounded_probabilities(p: Tensor) -> Tensor:
    return (p * P_SCALE).to(E4M3).float() / P_SCALE
