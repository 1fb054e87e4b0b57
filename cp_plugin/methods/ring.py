"""Ring: queries stay, keys and values travel once around the axis.

    step 0        step 1        step 2                forward   k, v travel; partials are merged where the queries are
    0: q0 kv0     0: q0 kv2     0: q0 kv1             backward  k, v travel again, and dk, dv after them, one step
    1: q1 kv1 ->  1: q1 kv0 ->  1: q1 kv2                       behind: P - 1 hops out, one more to come home
    2: q2 kv2     2: q2 kv1     2: q2 kv0

The next block is posted before the current one is computed. On contiguous tokens this is Ring Attention (arXiv
2310.01889), unbalanced under a causal mask; on zigzag tokens the balanced ring of Megatron-Core; on striped tokens it
is Striped Attention (arXiv 2311.09431, Algorithm 1): the method is the same, the layout makes the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cp_plugin.dtypes import accumulation_dtype
from cp_plugin.merge import add, merge, widened
from cp_plugin.mesh import Mesh
from cp_plugin.protocol import At, Attend, Gradients, Options, Partial, Problem, Provider


@dataclass(frozen=True, slots=True)
class Ring:
    """Pass keys and values around ``axis``; attend to each block with ``inner``."""

    mesh: Mesh
    axis: str
    inner: Attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At) -> Partial | None:
        steps = self.mesh.axes[self.axis]
        total = None
        for step in range(steps):
            arriving = self.mesh.shift(self.axis, (k, v)) if step + 1 < steps else None
            total = merge(total, self.inner.forward(q, k, v, q_at, kv_at))
            if arriving is not None:
                k, v = arriving.wait()
                kv_at = self.mesh.neighbours(self.axis, kv_at, -1)
        return total

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        q_at: At,
        kv_at: At,
    ) -> Gradients | None:
        steps = self.mesh.axes[self.axis]
        dq = following = None
        for step in range(steps):
            arriving = self.mesh.shift(self.axis, (k, v)) if step + 1 < steps else None
            grads = self.inner.backward(dout, q, k, v, lse, delta, q_at, kv_at)
            dk, dv = following.wait() if following is not None else (None, None)
            if grads is not None:
                dq, dk, dv = add(dq, grads.dq), add(dk, grads.dk), add(dv, grads.dv)
            following = self.mesh.shift(self.axis, (widened(dk, k), widened(dv, v)))
            if arriving is not None:
                k, v = arriving.wait()
                kv_at = self.mesh.neighbours(self.axis, kv_at, -1)
        dk, dv = following.wait()
        return Gradients(dq if dq is not None else torch.zeros_like(q), dk, dv)


def _axes(size: int, options: Options) -> dict[str, int]:
    return {"cp": size}


def _build(mesh: Mesh, local: Attend, options: Options) -> Attend:
    return Ring(mesh, "cp", local)


def _traffic(problem: Problem, options: Options) -> Mapping[tuple[str, str], int]:
    """k, v: P - 1 hops in each pass; dk, dv: P hops in the accumulation dtype. (A ring of one rank sends nothing.)"""
    if problem.size == 1:
        return {}
    there = (problem.size - 1) * problem.kv_elements * problem.dtype.itemsize
    home = problem.size * problem.kv_elements * accumulation_dtype(problem.dtype).itemsize
    return {("forward", "cp"): there, ("backward", "cp"): there + home}


PROVIDERS = (
    Provider(
        name="ring",
        summary="Ring Attention (arXiv 2310.01889): keys and values travel once around all ranks",
        layouts=("contiguous", "zigzag"),
        axes=_axes,
        build=_build,
        traffic=_traffic,
    ),
    Provider(
        name="striped",
        summary="Striped Attention (arXiv 2311.09431): the ring on cyclic tokens, balanced under a causal mask",
        layouts=("striped",),
        axes=_axes,
        build=_build,
        traffic=_traffic,
    ),
)
