"""Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509): exchange tokens for heads.

    outside  every rank: its tokens, all heads                 one all-to-all of q, k, v; one back of out
    inside   every rank: all tokens of the axis, h / n heads

Key/value heads that the ranks do not divide are repeated as often as needed, to lcm(g, n) heads, so that every rank
gets the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from cp_plugin.engine.comm import Mesh, Pending
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.comm.shards import arriving, gathered
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled_ranks
from cp_plugin.engine.core.values import KeyValues, Queries, Shard
from cp_plugin.engine.methods.moves import Move, Moved
from cp_plugin.engine.methods.protocol import Attend, Formula, Provider

HEAD = "head"
"""The axis whose ranks hold, inside the method, the same tokens and different heads."""


@dataclass(frozen=True, slots=True)
class Ulysses(Move):
    """All tokens of ``axis``, part of the heads. ``kv_heads``: key/value heads of this rank before the move."""

    mesh: Mesh
    axis: str
    kv_heads: int

    def bring_q(self, queries: Pending[Queries]) -> Pending[Queries]:
        return self._heads_to_tokens(queries.wait())

    def bring_kv(self, kv: Pending[KeyValues]) -> Pending[KeyValues]:
        held, n = kv.wait(), self._repeats()
        repeated = (t.repeat_interleave(n, 2) for t in held.tensors)
        return self._heads_to_tokens(KeyValues(*repeated, owners=held.owners))

    def return_out(self, partial: Pending[Tensors]) -> Pending[Tensors]:
        return self._tokens_to_heads(partial.wait())

    def return_dq(self, dq: Pending[Tensors]) -> Pending[Tensors]:
        return self._tokens_to_heads(dq.wait())

    def return_dkv(self, dkv: Pending[Tensors]) -> Pending[Tensors]:
        pending = self._tokens_to_heads(dkv.wait())
        n = self._repeats()
        return pending.then(
            lambda t: t if n == 1 else t.unflatten(2, (-1, n)).sum(3, dtype=accumulation_dtype(t.dtype))
        )

    def heads(self, count: int) -> slice:
        n = count // self.mesh.axes[self.axis]
        first = self.mesh.coordinates[self.axis] * n
        return slice(first, first + n)

    def _repeats(self) -> int:
        return lcm(self.kv_heads, self.mesh.axes[self.axis]) // self.kv_heads

    def _heads_to_tokens[S: Shard](self, shard: S) -> Pending[S]:
        """``[s, b, h, ...] -> [n * s, b, h / n, ...]``"""
        n = self.mesh.axes[self.axis]
        parts = [t.unflatten(2, (n, t.size(2) // n)).movedim(2, 0).flatten(0, 1) for t in shard.tensors]
        owners = gathered(self.mesh, self.axis, shard.owners)
        return arriving(type(shard), self.mesh.all_to_all(self.axis, parts), owners)

    def _tokens_to_heads(self, tensors: Tensors) -> Pending[Tensors]:
        """``[n * s, b, h / n, ...] -> [s, b, h, ...]``"""
        n = self.mesh.axes[self.axis]
        pending = self.mesh.all_to_all(self.axis, tensors)
        return pending.then(lambda t: t.unflatten(0, (n, t.size(0) // n)).movedim(0, 2).flatten(2, 3))


def heads_do_not_divide(problem: Problem, ranks: int, setting: str = "") -> str | None:
    """Return why the heads do not divide over this number of ranks; None if they do."""
    repeated = lcm(problem.kv_heads, ranks)
    if problem.heads % repeated == 0:
        return None
    return (
        f"{setting}: {problem.heads} query and {problem.kv_heads} key/value heads on each rank cannot be split across "
        f"{ranks} ranks: the query heads must be a multiple of {repeated}"
    )


def exchange_bytes(problem: Problem, ranks: int) -> Formula:
    """Bytes of the all-to-alls among so many ranks: of q, k, v and out, or of dout, dq, dk and dv."""
    kv = problem.kv_bytes // problem.kv_heads * lcm(problem.kv_heads, ranks)
    sent = (problem.q_bytes + problem.out_bytes + kv) * (ranks - 1) // ranks
    return {("forward", HEAD): sent, ("backward", HEAD): sent} if sent else {}


def _axes(size: int, options: Options) -> dict[str, int]:
    return {HEAD: size}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Moved((Ulysses(mesh, HEAD, problem.kv_heads),), local, kept=True)


def _unsupported(problem: Problem, options: Options) -> str | None:
    return heads_do_not_divide(problem, problem.size, spelled_ranks(problem.size))


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    return exchange_bytes(problem, problem.size)


PROVIDERS = (
    Provider(
        name="ulysses",
        summary="DeepSpeed-Ulysses (arXiv 2309.14509): every rank gets all tokens of some heads",
        layouts=("contiguous", "zigzag", "striped", "documents"),
        axes=_axes,
        build=_build,
        traffic=_traffic,
        unsupported=_unsupported,
    ),
)
