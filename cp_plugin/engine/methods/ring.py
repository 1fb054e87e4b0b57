"""Ring: queries stay, key/value blocks travel once around the axis.

    step 0        step 1        step 2                forward   k, v travel; partials are merged at their queries
    0: q0 kv0     0: q0 kv2     0: q0 kv1             backward  k, v travel again; dk, dv follow one step behind. The
    1: q1 kv1 ->  1: q1 kv0 ->  1: q1 kv2                       owner's own share stays, so they set out at the next
    2: q2 kv2     2: q2 kv1     2: q2 kv0                       rank and are home after P - 1 hops

The next block is posted before the current one is computed. Blocks travel up the ring in the forward and down in the
backward, as in Transformer Engine: under a causal mask the largest parts of dk and dv are then added last, which
matters where sums are rounded at each hop.

On contiguous tokens this is Ring Attention (arXiv 2310.01889), unbalanced under a causal mask; on zigzag tokens the
balanced ring of Megatron-Core; on striped tokens Striped Attention (arXiv 2311.09431, Algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cp_plugin.engine.comm import Mesh, Pending, sums
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.comm.shards import shift
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.kernels.merge import add, add_sums, widened
from cp_plugin.engine.methods.gradient_dtype import KEY_HOPS, with_gradient_dtype
from cp_plugin.engine.methods.protocol import Attend, Formula, Provider


@dataclass(frozen=True, slots=True)
class Ring:
    """Pass key/value blocks around ``axis`` and attend to each with ``inner``."""

    mesh: Mesh
    axis: str
    inner: Attend
    backward_moves: Literal["kv", "q"] = "kv"
    """What travels in the backward: k, v, dk, dv, or q, dout, lse, delta, dq (BurstAttention, arXiv 2403.09347)."""

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        n = self.mesh.axes[self.axis]
        for step in range(n):
            arriving = shift(self.mesh, self.axis, kv) if step + 1 < n else None  # post
            onto = self.inner.forward(queries, kv, onto)  # attend, merge
            kv = arriving.wait() if arriving else kv  # wait
        return onto

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        backward = self._backward_q if self.backward_moves == "q" else self._backward_kv
        return backward(queries, kv, onto)

    def _backward_kv(self, queries: Queries, kv: KeyValues, onto: Sums) -> Gradients:
        """k, v travel; dk, dv follow them, and dq is summed here."""
        n, dq, own, home = self.mesh.axes[self.axis], onto.dq, None, None
        for step in range(n):
            arriving = shift(self.mesh, self.axis, kv, by=-1) if step + 1 < n else None  # post
            grads = self.inner.backward(queries, kv, Sums(dq=dq))  # attend
            dq, dkv = (dq, (None, None)) if grads is None else (grads.dq, grads[1:])
            if own is None:
                own = dkv  # added when the sums come home
            else:
                home = self._send_home(_added(home, dkv), kv.tensors, by=-1)  # add, pass on
            kv = arriving.wait() if arriving else kv  # wait
        dq = torch.zeros_like(queries.q) if dq is None else dq
        return add_sums(onto._replace(dq=None), Gradients(dq, *_widened(_added(home, own), kv.tensors)))

    def _backward_q(self, queries: Queries, kv: KeyValues, onto: Sums) -> Gradients:
        """q, dout, lse, delta travel; dq follows them, and dk, dv are summed here."""
        n, (_, dk, dv), own, home = self.mesh.axes[self.axis], onto, None, None
        for step in range(n):
            arriving = shift(self.mesh, self.axis, queries) if step + 1 < n else None  # post
            grads = self.inner.backward(queries, kv, Sums(dk=dk, dv=dv))  # attend
            dq, dk, dv = (None, dk, dv) if grads is None else grads
            if own is None:
                own = (dq,)
            else:
                home = self._send_home(_added(home, (dq,)), (queries.q,), by=1)  # add, pass on
            queries = arriving.wait() if arriving else queries  # wait
        (dq,) = _widened(_added(home, own), (queries.q,))
        return Gradients(add(onto.dq, dq), *_widened((dk, dv), kv.tensors))

    def _send_home(self, totals: Parts, like: Tensors, by: int) -> Pending[Tensors]:
        """Pass the sums of a block on, one step behind the block; the last hop takes them to its owner."""
        return self.mesh.shift(self.axis, _widened(totals, like), by, group=sums(self.axis))


Parts = tuple[Tensor | None, ...]


def _added(arriving: Pending[Tensors] | None, parts: Parts) -> Parts:
    """The sums that arrive for a block, and this rank's contribution to them."""
    if arriving is None:
        return parts
    return tuple(t if part is None else add(t, part) for t, part in zip(arriving.wait(), parts, strict=True))


def _widened(totals: Parts, like: Tensors) -> Tensors:
    return tuple(map(widened, totals, like))


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Ring(mesh, "cp", local)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Blocks and sums make P - 1 hops in each pass."""
    hops = problem.size - 1
    forward, backward = hop_bytes(problem)
    return {("forward", "cp"): hops * forward, ("backward", "cp"): hops * backward} if hops else {}


def hop_bytes(problem: Problem, backward_moves: Literal["kv", "q"] = "kv") -> tuple[int, int]:
    """Bytes per hop of a ring: forward, and backward with the sums that follow."""
    kv = problem.kv_bytes
    if backward_moves == "kv":
        return kv, kv + problem.kv_elements * problem.sum_bytes
    q_side = problem.q_bytes + problem.out_bytes + 2 * problem.row_bytes
    return kv, q_side + problem.q_elements * problem.sum_bytes


RING = with_gradient_dtype(
    Provider(
        name="ring",
        summary="Ring Attention (arXiv 2310.01889): keys and values travel once around all ranks",
        layouts=("zigzag", "contiguous", "documents"),
        build=_build,
        traffic=_traffic,
    ),
    lambda options: KEY_HOPS,
)
STRIPED = replace(
    RING,
    name="striped",
    summary="Striped Attention (arXiv 2311.09431): the ring on cyclic tokens, balanced under a causal mask",
    layouts=("striped",),
)
PROVIDERS = (RING, STRIPED)
