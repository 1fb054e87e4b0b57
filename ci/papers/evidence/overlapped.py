"""ATTENTION2D-O (arXiv 2503.15758, Algorithms 4 to 6), for the planner alone: rings instead of gathers.

    GthrCmpt        keys and values go up the column: own queries with each block; all blocks are kept
    GthrCmptSctr    queries go along the row and meet all blocks of the column; their partials follow one step behind

FlashAttention has no mask for the staircase of a query block over a whole column, so blocks are computed one by one, as
in the paper. Its Algorithm 3, the backward, was not found; assumed are the same two rings, with gradients in place of
outputs, and a reduce-scatter of dk, dv along the column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cp_plugin.engine.comm import WHOLE, Mesh, sums
from cp_plugin.engine.comm.shards import shift
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.kernels.merge import add, merge, widened
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.attention2d import KV, Q, Transpose
from cp_plugin.engine.methods.moves import Moved
from cp_plugin.engine.methods.protocol import Attend, Formula


@dataclass(frozen=True, slots=True)
class Overlapped:
    """Two rings on a grid, around ``inner``."""

    mesh: Mesh
    inner: Attend

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        columns, rows, dtype = self.mesh.axes[Q], self.mesh.axes[KV], queries.q.dtype
        arriving = shift(self.mesh, Q, queries) if columns > 1 else None
        own, blocks = None, [kv]
        for step in range(rows):
            coming = shift(self.mesh, KV, blocks[-1]) if step + 1 < rows else None
            own = self.inner.forward(queries, blocks[-1], own)
            if coming is not None:
                blocks.append(coming.wait())
        travelling = None
        for step in range(1, columns):
            assert arriving is not None
            queries = arriving.wait()
            arriving = shift(self.mesh, Q, queries) if step + 1 < columns else None
            part = None
            for block in blocks:
                part = self.inner.forward(queries, block, part)
            if travelling is not None:
                part = merge(Partial(*travelling.wait()), part)
            assert part is not None
            travelling = self.mesh.shift(Q, (part.out.to(dtype), part.lse), group=sums(Q))
        return own if travelling is None else merge(own, Partial(*travelling.wait()))

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        columns, rows = self.mesh.axes[Q], self.mesh.axes[KV]
        blocks, sums_of = [kv], [(None, None)] * rows
        for _ in range(rows - 1):
            blocks.append(shift(self.mesh, KV, blocks[-1]).wait())
        own, travelling = None, None
        for step in range(columns):
            arriving = shift(self.mesh, Q, queries) if step + 1 < columns else None
            total = None
            for place, block in enumerate(blocks):
                grads = self.inner.backward(queries, block)
                if grads is not None:
                    total = add(total, grads.dq)
                    sums_of[place] = tuple(add(s, g) for s, g in zip(sums_of[place], grads[1:], strict=True))
            total = widened(total, queries.q)
            if step == 0:
                own = total
            else:
                both = total if travelling is None else add(travelling.wait()[0], total)
                travelling = self.mesh.shift(Q, (both,), group=sums(Q))
            queries = arriving.wait() if arriving else queries
        own_row = self.mesh.coordinates[KV]
        in_order = [sums_of[(own_row - rank) % rows] for rank in range(rows)]
        column = [torch.cat([widened(s[i], x) for s in in_order]) for i, x in enumerate(kv.tensors)]
        home = self.mesh.reduce_scatter(KV, column)
        assert own is not None
        dq = add(own, travelling.wait()[0]) if travelling is not None else own
        return Gradients(dq, *home.wait())


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Moved((Transpose(mesh),), Overlapped(mesh, local), kept=True)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    raise NotImplementedError("a method of the planner alone has no formula")


OVERLAPPED = replace(
    providers.get("attention2d"),
    name="attention2d-overlapped",
    summary="ATTENTION2D-O (arXiv 2503.15758): queries along rows, keys and values along columns, both by rings",
    layouts=("striped",),
    options=("grid", "head_groups"),
    build=_build,
    traffic=_traffic,
    extra_groups=(WHOLE, sums(Q)),
    collective_axes=(),
)
