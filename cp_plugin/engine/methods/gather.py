"""All-gather along an axis: one side is gathered, its results return reduced.

    GatherKV   k, v are gathered; dk, dv are reduce-scattered               all-gather attention (Llama 3, LASP-2H)
    GatherQ    q is gathered; partial outputs are exchanged and merged     the other half of ATTENTION2D
               q, dout, lse, delta are gathered; dq is reduce-scattered

Nothing gathered is kept: the backward pass gathers again. Sums travel in float32 unless ``--cp-gradient-dtype`` says
otherwise; outputs travel in the model's dtype. GatherQ's merge is ATTENTION2D's Algorithm 7 (arXiv 2503.15758) as one
all-to-all and one local merge.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_plugin.engine.comm import Mesh, Pending
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.comm.shards import all_gather
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues, Partial, Queries
from cp_plugin.engine.kernels.merge import merge_all
from cp_plugin.engine.methods.gradient_dtype import REDUCE_SCATTER, with_gradient_dtype
from cp_plugin.engine.methods.moves import HEAD_GROUPS, Move, Moved, groups_do_not_divide
from cp_plugin.engine.methods.protocol import Attend, Formula, Provider


@dataclass(frozen=True, slots=True)
class GatherKV(Move):
    """Gather keys and values along ``axis``."""

    mesh: Mesh
    axis: str

    def bring_kv(self, kv: Pending[KeyValues]) -> Pending[KeyValues]:
        return all_gather(self.mesh, self.axis, kv.wait())

    def return_dkv(self, dkv: Pending[Tensors]) -> Pending[Tensors]:
        return self.mesh.reduce_scatter(self.axis, dkv.wait())


@dataclass(frozen=True, slots=True)
class GatherQ(Move):
    """Gather queries along ``axis``."""

    mesh: Mesh
    axis: str

    def bring_q(self, queries: Pending[Queries]) -> Pending[Queries]:
        return all_gather(self.mesh, self.axis, queries.wait())

    def return_out(self, partial: Pending[Tensors]) -> Pending[Tensors]:
        n = self.mesh.axes[self.axis]
        out, lse = partial.wait()
        parts = self.mesh.all_to_all(self.axis, (out, lse))

        def merged() -> Tensors:
            outs, lses = (t.chunk(n) for t in parts.wait())
            merged = merge_all(map(Partial, outs, lses))
            assert merged is not None
            return merged

        return Pending(merged)

    def return_dq(self, dq: Pending[Tensors]) -> Pending[Tensors]:
        return self.mesh.reduce_scatter(self.axis, dq.wait())


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Moved((GatherKV(mesh, "cp"),), local, groups=options.head_groups or 1)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """k, v are gathered in each pass; dk, dv are reduce-scattered."""
    if problem.size == 1:
        return {}
    others = problem.size - 1
    gathered_bytes = others * problem.kv_bytes
    return {
        ("forward", "cp"): gathered_bytes,
        ("backward", "cp"): gathered_bytes + others * problem.kv_elements * problem.sum_bytes,
    }


PROVIDERS = (
    with_gradient_dtype(
        Provider(
            name="all_gather",
            summary="all-gather of keys and values (Llama 3, arXiv 2407.21783; LASP-2H's softmax layers)",
            layouts=("zigzag", "striped", "contiguous", "documents"),
            options=(HEAD_GROUPS,),
            unsupported=groups_do_not_divide,
            build=_build,
            traffic=_traffic,
            collective_axes=("cp",),
        ),
        lambda options: REDUCE_SCATTER,
    ),
)
