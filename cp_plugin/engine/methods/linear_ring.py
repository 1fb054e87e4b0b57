"""Linear attention as a ring: keys and values travel, and (q k^T) v is computed from the left.

The baseline of LASP-2's paper (section 4.1). Its work grows with the square of the sequence length and its bytes with
the length; LASP-2's work grows with the length, its bytes do not grow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cp_plugin.engine.comm import sums
from cp_plugin.engine.comm.shards import shift
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues
from cp_plugin.engine.linear import segment
from cp_plugin.engine.linear.tokens import Tokens, group_queries
from cp_plugin.engine.methods.gradient_dtype import with_gradient_dtype
from cp_plugin.engine.methods.lasp2 import AXIS, LASP2, Lasp2, causal_only
from cp_plugin.engine.methods.ring import RING

_ROWS = 1024  # queries whose scores with a segment's keys are in memory at a time


@dataclass(frozen=True, slots=True)
class LinearRing(Lasp2):
    """A ``Scan`` without states, but in generation: all keys and values pass by every rank."""

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        n, kv = self.mesh.axes[AXIS], KeyValues(x.k, x.v)
        out = self.parts.kernel.forward(x)
        for step in range(n):
            arriving = shift(self.mesh, AXIS, kv) if step + 1 < n else None  # post
            out = out + self._product(x, kv, out)  # compute, add
            kv = arriving.wait() if arriving else kv  # wait
        return out, ()

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        dq, *own = self.parts.kernel.backward(dout, x)
        n, kv, home = self.mesh.axes[AXIS], KeyValues(x.k, x.v), None
        for step in range(n):
            arriving = shift(self.mesh, AXIS, kv) if step + 1 < n else None  # post
            with torch.enable_grad():  # compute
                block = segment.detached(x._replace(k=kv.k, v=kv.v))
                seen = KeyValues(block.k, block.v, owners=kv.owners)
                grads = segment.gradients([(self._product(block, seen, dout), dout)], block.differentiable)
            dq = dq + grads[0]
            if step == 0:  # this rank's own share stays
                own = [a + b for a, b in zip(own, grads[1:], strict=True)]
            else:
                totals = grads[1:] if home is None else map(torch.add, home, grads[1:])
                home = self.mesh.shift(AXIS, [t.to(dout.dtype) for t in totals], group=sums(AXIS)).wait()
            kv = arriving.wait() if arriving else kv  # wait
        return dq, *(own if home is None else map(torch.add, own, home))

    def _product(self, x: Tokens, kv: KeyValues, like: Tensor) -> Tensor:
        """This rank's queries times a rank's earlier keys, segment by segment."""
        segments = self._segments
        (source,) = kv.owners(self.mesh.index)
        q, k, v = (y.to(like.dtype).unflatten(1, (segments, -1)) for y in (group_queries(x), *kv.tensors))
        outs = []
        for own in range(segments):
            place = self.parts.order.index(self.mesh.index * segments + own)
            out = torch.zeros_like(like[:, : q.size(2)])
            for other in range(segments):
                if self.parts.order.index(source * segments + other) < place:
                    out = out + _left_product(q[:, own], k[:, other], v[:, other])
            outs.append(out)
        return torch.cat(outs, 1)


def _left_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(q k^T) v in this order: ``[t, b, g, r, d]``, ``[t, b, g, d]``, ``[t, b, g, e]`` -> ``[t, b, h, e]``."""
    rows = []
    for part in q.split(_ROWS):
        scores = torch.einsum("ibgrd,jbgd->bgrij", part, k)
        rows.append(torch.einsum("bgrij,jbge->ibgre", scores, v))
    return torch.cat(rows).flatten(2, 3)


def _unsupported(problem: Problem, options: Options) -> str | None:
    if problem.delta:
        return "the baseline has no delta rule: use lasp2"
    if problem.decay != "none" or problem.documents:
        return "the baseline supports neither decays nor packed documents: use lasp2"
    return causal_only(problem, options)


PROVIDERS = (
    with_gradient_dtype(
        replace(
            LASP2,
            name="linear_ring",
            summary="linear attention as a ring of keys and values, left products; the baseline of LASP-2's paper",
            build=lambda mesh, parts, problem, options: LinearRing(mesh, parts),
            traffic=RING.traffic,
            unsupported=_unsupported,
            collective_axes=(),
        )
    ),
)
