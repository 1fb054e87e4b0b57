"""cuDNN fused attention through torch (``aten::_scaled_dot_product_cudnn_attention``): bfloat16 and float16 on CUDA.

Known issue of cuDNN up to 9.30 on Hopper (pytorch issue 196678, cudnn-frontend pull request 628 and issue 1072): the
backward may return NaN, which is easy to notice, if a row's log-sum-exp is below -88.7 and a tile has 64 keys more than
a multiple of 128, or a single row. Tiles of multiples of 128 are not affected.

Not measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo
from cp_plugin.engine.kernels.backends.sdpa import TakesOut, heads_first, is_causal, no_half_on_cuda, rows_first

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Cudnn(TakesOut):
    """cuDNN's fused attention."""

    name: str = "cudnn"
    packages: ClassVar = ("torch",)

    def unsupported(self, call: CallInfo) -> str | None:
        if reason := no_half_on_cuda("cuDNN's attention", call):
            return reason
        if not torch.backends.cudnn.is_available():
            return "this torch was built without cuDNN"
        if torch.are_deterministic_algorithms_enabled():
            return "torch does not consider cuDNN's attention deterministic"
        version, capability = torch.backends.cudnn.version() or 0, torch.cuda.get_device_capability(call.device)
        sizes = (call.head_dim, call.v_head_dim)
        if sizes == (192, 128) and version >= 91100 and capability[0] == 10:
            return None
        # as limited by torch (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)
        largest = 256 if version >= 91000 and capability == (9, 0) else 128
        if any(size > largest or size % 8 for size in sizes):
            return (
                f"cuDNN's attention takes head sizes that are multiples of 8 up to {largest} here, not {sizes[0]}, "
                f"{sizes[1]}"
            )
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        q, k, v, causal = *map(heads_first, (q, k, v)), is_causal(q, k, diagonal)
        out, lse = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scores.scale)[:2]
        return rows_first(out), lse.view(out.shape[:3]).permute(2, 0, 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal, dout, out = is_causal(q, k, diagonal), _dense(dout, q), _dense(term, q)
        dout, q, k, v, out = map(heads_first, (dout, q, k, v, out))
        lse = lse.permute(1, 2, 0).unsqueeze(-1).contiguous()
        rng = torch.empty((), dtype=torch.int64, device=q.device)  # unused without dropout
        lengths = (None, None, q.size(2), k.size(2))
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, rng, rng, None, *lengths, 0.0, causal, scale=scores.scale
        )
        dq, dk, dv = map(rows_first, grads)
        return dq, dk, dv


def _dense(x: Tensor, q: Tensor) -> Tensor:
    """``x [s, b, h, e]`` dense, in the order of q's dimensions.

    torch finds the graph of a backward by the sizes and strides of q, k and v alone, and hands it the addresses of out
    and dout, with the strides of its first call.
    """
    order = (*sorted(range(3), key=q.stride, reverse=True), 3)
    dense = x.permute(order).contiguous()
    return dense.flatten().view(dense.shape).permute([order.index(i) for i in range(4)])


BACKEND = Cudnn()
