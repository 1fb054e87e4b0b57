"""torch's flash attention, called below ``scaled_dot_product_attention`` to get the log-sum-exp.

On the CPU ``aten::_scaled_dot_product_flash_attention_for_cpu`` (float64, float32, bfloat16, float16), on CUDA
``aten::_scaled_dot_product_flash_attention`` (FlashAttention-2; bfloat16, float16). Both support grouped key/value
heads, and given the global log-sum-exp the backward returns exactly this tile's share of the gradients. They require
one head size, so smaller heads are zero-padded, which changes no score and no output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels.fused import out_from_delta

_aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


def no_half_on_cuda(title: str, call: CallInfo) -> str | None:
    """Return why a kernel for bfloat16 and float16 on CUDA cannot run the call, or None."""
    if call.device.type != "cuda":
        return f"{title} runs on CUDA devices only"
    return None if call.dtype in HALF else f"{title} takes bfloat16 and float16, not {call.dtype}"


class TakesOut:
    """A backend whose backward wants an ``out``, of full and of square causal tiles."""

    __slots__ = ()
    any_diagonal: ClassVar = False

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return out_from_delta(dout, delta)


@dataclass(frozen=True, slots=True)
class Sdpa(TakesOut):
    """FlashAttention as built into torch."""

    name: str = "sdpa"
    packages: ClassVar = ("torch",)

    def unsupported(self, call: CallInfo) -> str | None:
        device, dtype = call.device.type, call.dtype
        if device not in ("cpu", "cuda"):
            return f"torch has no flash attention for {device}"
        if device == "cpu":
            return None if dtype in (*HALF, torch.float32, torch.float64) else f"torch has no CPU kernel for {dtype}"
        if reason := no_half_on_cuda("torch's flash attention on CUDA", call):
            return reason
        size = max(call.head_dim, call.v_head_dim)
        if size % 8 or size > 256:
            return f"torch's flash attention on CUDA takes head sizes that are multiples of 8 up to 256, not {size}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        size, causal = v.size(3), is_causal(q, k, diagonal)
        q, k, v = _arranged(q, k, v)
        if q.is_cuda:
            out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scores.scale)[:2]
            lse = minus_infinity(lse)
        else:
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scores.scale)
            lse = _blind_rows_repaired(lse, q, k, causal, scores.scale)
        return rows_first(out)[..., :size], lse.permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes, causal = (q.size(3), k.size(3), v.size(3)), is_causal(q, k, diagonal)
        q, k, v, dout, out = _arranged(q, k, v, dout, term)
        lse = lse.permute(1, 2, 0).contiguous()
        if q.is_cuda:
            rng = torch.empty(2, dtype=torch.uint64, device=q.device)  # unused without dropout
            lengths = (None, None, q.size(2), k.size(2))  # no cumulative lengths in dense batches; maxima
            grads = _aten._scaled_dot_product_flash_attention_backward(
                dout, q, k, v, out, lse, *lengths, 0.0, causal, rng, rng[:0], scale=scores.scale
            )
        else:
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout, q, k, v, out, lse, 0.0, causal, scale=scores.scale
            )
        dq, dk, dv = (rows_first(grad)[..., :size] for grad, size in zip(grads, sizes, strict=True))
        return dq, dk, dv


def _arranged(q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """``[b, h, s, d]`` of one head size. On the CPU k and v, which are read once per block of queries, are contiguous:
    torch's kernel is slower on the strides of a view. Its outputs have the strides of q."""
    q, k, v, *rows = one_head_size(*map(heads_first, (q, k, v, *rows)))
    return q, *(x.contiguous() if x.is_cpu else x for x in (k, v)), *rows


def minus_infinity(lse: Tensor) -> Tensor:
    """``lse`` with -inf ("no key seen") where FlashAttention-2 returns +inf. In place.

    That is in rows without a finite score (csrc/flash_attn/src/softmax.h, also in torch). On one device such a row has
    no result, but it may be blind in one tile only (an infinity in k). A score of +inf looks the same, and its NaN in
    out stays. FlashAttention-3 and 4 return -inf, as do cuDNN's kernels as far as published (cudnn-frontend,
    generated/sdpa).
    """
    return torch.nan_to_num_(lse, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def _blind_rows_repaired(lse: Tensor, q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """Log-sum-exps ``[b, h, s]`` with -inf where all scores are -inf.

    torch's CPU kernel returns 0 there (see ``minus_infinity``). A true 0 is rare, so the scores of all rows with a 0
    are recomputed.
    """
    if lse.is_meta or not (lse == 0).any():
        return lse
    rows = (lse == 0).flatten(0, 1).any(0).nonzero().flatten()
    scores = q[:, :, rows] @ k.repeat_interleave(q.size(1) // k.size(1), 1).mT * scale
    if causal:
        hidden = torch.arange(k.size(2), device=k.device) > rows[:, None]
        scores = scores.masked_fill(hidden, -torch.inf)
    blind = (scores == -torch.inf).all(-1)
    lse[:, :, rows] = lse[:, :, rows].masked_fill(blind, -torch.inf)
    return lse


def heads_first(x: Tensor) -> Tensor:
    """A view ``[b, h, s, d]`` of ``[s, b, h, d]``."""
    return x.permute(1, 2, 0, 3)


def one_head_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``[b, h, s, ...]`` tensors, zero-padded to the largest head size."""
    size = max(x.size(3) for x in tensors)
    return tuple(pad(x, (0, size - x.size(3))) if x.size(3) < size else x for x in tensors)


def rows_first(x: Tensor) -> Tensor:
    """A view ``[s, b, h, d]`` of ``[b, h, s, d]``."""
    return x.permute(2, 0, 1, 3)


def is_causal(q: Tensor, k: Tensor, diagonal: int) -> bool:
    """Return True if the tile is causal (square, diagonal 0); otherwise it must be full."""
    if diagonal >= k.size(0) - 1:
        return False
    assert diagonal == 0 and q.size(0) == k.size(0), (
        f"a tile {q.size(0)} x {k.size(0)}, diagonal {diagonal}, must be cut"
    )
    return True


BACKEND = Sdpa()
