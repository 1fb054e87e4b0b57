"""Ring: queries stay, keys and values travel once around the axis.

    step 0        step 1        step 2                forward   k, v travel; partials are merged where the queries are
    0: q0 kv0     0: q0 kv2     0: q0 kv1             backward  k, v travel again, and dk, dv after them, one step
    1: q1 kv1 ->  1: q1 kv0 ->  1: q1 kv2                       behind: a rank's own part stays, so that they start at
    2: q2 kv2     2: q2 kv1     2: q2 kv0                       the next one, and are home after P - 1 hops

Keys travel up the ring in the forward and down in the backward, as in Transformer Engine: under a causal mask the
largest parts of dk and dv are then added last, which matters where sums are rounded at each hop.

The next block is posted before the current one is computed. On contiguous tokens this is Ring Attention (arXiv
2310.01889), unbalanced under a causal mask; on zigzag tokens the balanced ring of Megatron-Core; on striped tokens it
is Striped Attention (arXiv 2311.09431, Algorithm 1): the method is the same, the layout makes the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cp_plugin.comm import Mesh, Pending, sums
from cp_plugin.core.problem import Options, Problem
from cp_plugin.core.values import NO_SUMS, Gradients, Partial, Sums
from cp_plugin.kernels.merge import add, add_sums, widened
from cp_plugin.methods.gradient_dtype import with_gradient_dtype
from cp_plugin.methods.protocol import At, Attend, Formula, Provider, shifted


@dataclass(frozen=True, slots=True)
class Ring:
    """Pass keys and values around ``axis``; attend to each block with ``inner``."""

    mesh: Mesh
    axis: str
    inner: Attend
    backward_moves: Literal["kv", "q"] = "kv"
    """What travels in the backward: k, v, dk, dv, or (BurstAttention, arXiv 2403.09347) q, dout, lse, delta, dq."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At, onto: Partial | None = None
    ) -> Partial | None:
        for step, (k_i, v_i) in self._round(k, v):
            onto = self.inner.forward(q, k_i, v_i, q_at, self._moved(kv_at, step), onto)
        return onto

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
        onto: Sums = NO_SUMS,
    ) -> Gradients | None:
        if self.backward_moves == "q":
            return self._backward_q(dout, q, k, v, lse, delta, q_at, kv_at, onto)
        dq, home = onto.dq, _Follower(self.mesh, self.axis, (k, v), by=-1)
        for step, (k_i, v_i) in self._round(k, v, by=-1):
            grads = self.inner.backward(dout, q, k_i, v_i, lse, delta, q_at, self._moved(kv_at, -step), Sums(dq=dq))
            if grads is not None:
                dq = grads.dq
            home.add(grads[1:] if grads is not None else None)
        return add_sums(onto._replace(dq=None), Gradients(torch.zeros_like(q) if dq is None else dq, *home.arrived()))

    def _backward_q(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        q_at: At,
        kv_at: At,
        onto: Sums,
    ) -> Gradients | None:
        _, dk, dv = onto
        home = _Follower(self.mesh, self.axis, (q,))
        for step, (q_i, dout_i, lse_i, delta_i) in self._round(q, dout, lse, delta):
            at, so_far = self._moved(q_at, step), Sums(dk=dk, dv=dv)
            grads = self.inner.backward(dout_i, q_i, k, v, lse_i, delta_i, at, kv_at, so_far)
            if grads is not None:
                _, dk, dv = grads
            home.add(grads[:1] if grads is not None else None)
        return add_sums(Sums(dq=onto.dq), Gradients(*home.arrived(), widened(dk, k), widened(dv, v)))

    def _moved(self, at: At, steps: int) -> At:
        return shifted(self.mesh, self.axis, at, steps)

    def _round(self, *tensors: Tensor, by: int = 1) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The blocks of all ranks of the axis, own first; the next is posted before one is handed out."""
        steps = self.mesh.axes[self.axis]
        for step in range(steps):
            arriving = self.mesh.shift(self.axis, tensors, by) if step + 1 < steps else None
            yield step, tensors
            if arriving is not None:
                tensors = arriving.wait()


class _Follower:
    """Sums that follow their block around the ring, one step behind, and come home with the last hop. The part of the
    rank whose block it is waits for them there, and is added in full."""

    def __init__(self, mesh: Mesh, axis: str, blocks: tuple[Tensor, ...], by: int = 1) -> None:
        self._mesh, self._axis, self._blocks, self._by = mesh, axis, blocks, by
        self._own: tuple[Tensor | None, ...] | None = None
        self._travelling: Pending | None = None

    def add(self, parts: tuple[Tensor, ...] | None) -> None:
        """Keep the first part, which is this rank's own; add later ones to the sums that have arrived, and send these
        on."""
        nothing = (None,) * len(self._blocks)
        if self._own is None:
            self._own = parts or nothing
            return
        sums_so_far = self._travelling.wait() if self._travelling is not None else nothing
        if parts is not None:
            sums_so_far = tuple(add(s, p) for s, p in zip(sums_so_far, parts, strict=True))
        self._travelling = self._mesh.shift(
            self._axis,
            [widened(s, b) for s, b in zip(sums_so_far, self._blocks, strict=True)],
            self._by,
            group=sums(self._axis),
        )

    def arrived(self) -> tuple[Tensor, ...]:
        """The sums of this rank's own block."""
        assert self._own is not None
        if self._travelling is None:
            return tuple(widened(part, block) for part, block in zip(self._own, self._blocks, strict=True))
        arrived = self._travelling.wait()
        return tuple(s if part is None else add(s, part) for s, part in zip(arrived, self._own, strict=True))


def _axes(size: int, options: Options) -> dict[str, int]:
    return {"cp": size}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Ring(mesh, "cp", local)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Blocks make P - 1 hops in each pass, and so do sums."""
    if problem.size == 1:
        return {}
    sent = ring_bytes(problem)
    return {
        ("forward", "cp"): (problem.size - 1) * sent.forward,
        ("backward", "cp"): sent.backward_around(problem.size),
    }


class RingBytes(NamedTuple):
    """Bytes of one hop."""

    forward: int
    """k, v."""
    backward: int
    """What travels in the backward."""
    home: int
    """The sums that follow it."""

    def backward_around(self, ranks: int) -> int:
        """Bytes of a whole backward: blocks and sums make one hop less than there are ranks."""
        return (ranks - 1) * (self.backward + self.home)


def ring_bytes(problem: Problem, backward_moves: Literal["kv", "q"] = "kv") -> RingBytes:
    """What travels around a ring, per hop."""
    kv = problem.kv_bytes
    if backward_moves == "kv":
        return RingBytes(kv, kv, problem.kv_elements * problem.sum_bytes)
    q_side = problem.q_bytes + problem.out_bytes + 2 * problem.row_bytes
    return RingBytes(kv, q_side, problem.q_elements * problem.sum_bytes)


RING = with_gradient_dtype(
    Provider(
        name="ring",
        summary="Ring Attention (arXiv 2310.01889): keys and values travel once around all ranks",
        layouts=("contiguous", "zigzag"),
        axes=_axes,
        build=_build,
        traffic=_traffic,
    )
)
STRIPED = replace(
    RING,
    name="striped",
    summary="Striped Attention (arXiv 2311.09431): the ring on cyclic tokens, balanced under a causal mask",
    layouts=("striped",),
)
PROVIDERS = (RING, STRIPED)
