"""PyTorch's own context-parallel ring around torch's flash attention.

    torch.distributed.tensor.experimental._context_parallel._attention
      _templated_ring_attention, _templated_ring_attention_backward    the ring, forward and backward
      _AllToAllRotater, _AllGatherRotater                              moving k and v: hop by hop, or all at once
      _HeadTailLoadBalancer                                            load balancing under a causal mask (zigzag)

Upstream registers these for CUDA kernels only; the two templates take any kernel. An upstream hop is an all-to-all in
which all messages but one are empty, which Gloo is slow at. ``hops=p2p`` replaces it by a send and a receive of the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as upstream
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from cp_plugin.engine.attention.calls import Inputs

_aten = torch.ops.aten


class _Hop(upstream._RingRotater):
    """A rotater with upstream's interface: one send and one receive."""

    def __init__(self, pg: dist.ProcessGroup, seq_dim: int) -> None:
        self._group = pg

    def exchange_buffers(self, curr_buffer: Tensor) -> None:
        size, rank = self._group.size(), self._group.rank()
        self._sent, self._received = curr_buffer.contiguous(), curr_buffer.new_empty(curr_buffer.shape)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, self._received, group=self._group, group_peer=(rank - 1) % size),
                dist.P2POp(dist.isend, self._sent, group=self._group, group_peer=(rank + 1) % size),
            ]
        )

    def next_buffer(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


class TorchRing:
    """A ``Contestant``. Tensors inside are ``[b, heads, s, d]``, as upstream has them."""

    ROTATIONS: ClassVar = {
        "alltoall": upstream._RotateMethod.ALL_TO_ALL,
        "allgather": upstream._RotateMethod.ALL_GATHER,
    }
    HOPS: ClassVar = {"alltoall": upstream._AllToAllRotater, "p2p": _Hop}

    def __init__(
        self, group: dist.ProcessGroup, *, causal: bool, rotate: str = "allgather", hops: str = "alltoall"
    ) -> None:
        self._group, self._causal, self._rotate, self._hops = group, causal, rotate, hops
        self.settings = f"{'head-tail' if causal else 'contiguous'}, rotate {rotate}, hops {hops}"

    def shard(self, x: Tensor) -> Tensor:
        size, rank = self._group.size(), self._group.rank()
        if self._causal:
            x = x[_HeadTailLoadBalancer(x.size(0), size, x.device)._generate_indices()[0]]
        return self.arranged(x.chunk(size)[rank])

    def arranged(self, x: Tensor) -> Tensor:
        return x.permute(1, 2, 0, 3).contiguous()

    def step(self, x: Inputs, between: Callable[[], object] = lambda: None) -> tuple[Tensor, ...]:
        upstream._cp_options.enable_load_balance = self._causal
        upstream._cp_options.rotate_method = self.ROTATIONS[self._rotate]
        upstream._AllToAllRotater = self.HOPS[self._hops]
        how = {"is_causal": self._causal, "dropout_p": 0.0}
        q, k, v, dout, *_ = x
        with torch.no_grad():
            out, lse, *_ = upstream._templated_ring_attention(self._group, 2, forward, q, k, v, **how)
            between()
            grads = upstream._templated_ring_attention_backward(
                self._group, 2, backward, dout, "grad_out", q, k, v, out, lse, **how
            )
        return out, *grads

    def booked(self) -> None:
        return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, dropout_p: float, scale: float | None = None
) -> tuple[Tensor, ...]:
    """Out and log-sum-exp of torch's flash attention, as upstream's templates call it."""
    if q.is_cuda:
        return _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[:2]
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, scale=scale)


def backward(
    *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, **how: Any
) -> tuple[Tensor, ...]:
    """The gradients of ``forward``, likewise."""
    tensors, dropout, causal = (grad_out, query, key, value, out, logsumexp), how["dropout_p"], how["is_causal"]
    scale = how.get("scale")
    if not query.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, dropout, causal, scale=scale)
    rng = torch.empty(2, dtype=torch.uint64, device=query.device)  # not read without dropout
    lengths = (None, None, query.size(2), key.size(2))  # no cumulative lengths in dense batches; the longest rows
    return _aten._scaled_dot_product_flash_attention_backward(
        *tensors, *lengths, dropout, causal, rng, rng[:0], scale=scale
    )
