"""Upstream context parallelism without a GPU: stock Megatron around PyTorch's ring.

Megatron's context-parallel attention is Transformer Engine's, which needs CUDA. ``install`` replaces the local spec's
attention by PyTorch's ring, on the zigzag ("head-tail") layout that both use; the layout, RoPE, losses and gradients
are stock, and no hook of the plugin is installed.

The ring is ``torch.distributed.tensor.experimental._context_parallel._attention`` around torch's flash attention for
the CPU. It is causal only: no window, no sink, no packed documents.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from cp_plugin.tools.bench import torch_ring

_SEQUENCE = 2
_HOW = {"is_causal": True, "dropout_p": 0.0}


class RingDotProductAttention(DotProductAttention):
    """Megatron's attention on one rank, PyTorch's ring on several."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1  # the base class asserts that it is 1
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            config.context_parallel_size = size

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[s/cp, b, h, d]`` -> ``[s/cp, b, h * d]``. Raises ValueError for packed documents."""
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return super().forward(query, key, value, *args, **kwargs)
        if kwargs.get("packed_seq_params") is not None:
            raise ValueError("PyTorch's ring has no packed documents")
        groups = query.size(2) // key.size(2)
        whole = (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2))
        out = _Ring.apply(group, self.softmax_scale, *(x.permute(1, 2, 0, 3).contiguous() for x in whole))
        return out.permute(2, 0, 1, 3).flatten(2)


class _Ring(torch.autograd.Function):
    """This rank's q, k, v ``[b, h, s/cp, d]`` -> out of the same shape."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, scale: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, *_ = ring._templated_ring_attention(
            group, _SEQUENCE, torch_ring.forward, q, k, v, scale=scale, **_HOW
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.scale = group, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        grads = ring._templated_ring_attention_backward(
            ctx.group, _SEQUENCE, torch_ring.backward, dout, "grad_out", *ctx.saved_tensors, scale=ctx.scale, **_HOW
        )
        return None, None, *grads[:3]


def install() -> None:
    """Replace attention for the rest of the process; call it in CPU mode before Megatron builds a model."""
    from megatron.core.models import backends

    ring._cp_options.enable_load_balance = True
    backends.DotProductAttention = RingDotProductAttention
