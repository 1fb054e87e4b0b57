"""How much of the attention a rank computes, known without measuring: the visible pairs that its method brings to it.

The method itself is run once on a mesh without peers and tensors without data; where the kernel would be, the tiles
that arrive are counted. Linear layers are not counted: a token costs the same wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm import TraceMesh
from cp_plugin.core.layout import Segments, sort_positions
from cp_plugin.core.mask import Mask
from cp_plugin.core.problem import Problem
from cp_plugin.core.tiles import tiles
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Owners, Partial, Queries, Sums
from cp_plugin.methods.moves import nothing_seen
from cp_plugin.methods.registry import Resolved

_NO_DATA = torch.device("meta")


@dataclass(slots=True)
class _Counter:
    """An ``Attend`` that computes nothing and counts the pairs it was asked for."""

    segments: Callable[[Owners], Segments]
    mask: Mask
    pairs: int = 0

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        rows, keys = (sort_positions(self.segments(at), _NO_DATA)[0] for at in (queries.owners, kv.owners))
        found = tiles(rows, keys, self.mask)
        self.pairs += sum(tile.pairs for tile in found) * queries.q.size(2)
        return nothing_seen(queries, kv) if found else onto

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        raise NotImplementedError("the forward says it all")


def visible_pairs(cp: ContextParallel, problem: Problem) -> int:
    """(query, key) pairs times heads that this rank computes in the forward of one call."""
    mesh = TraceMesh(cp.mesh.axes, cp.index)
    alike = ContextParallel(Resolved(provider=cp.provider, problem=problem, options=cp.options), mesh=mesh)
    mask = Mask.of(problem.causal, problem.window)
    counter = _Counter(lambda at: alike.segments(problem.seq_length, at), mask)
    s, b = problem.seq_length // problem.size, problem.batch
    q = torch.empty(s, b, problem.heads, problem.head_dim, dtype=problem.dtype, device=_NO_DATA)
    k = torch.empty(s, b, problem.kv_heads, problem.head_dim, dtype=problem.dtype, device=_NO_DATA)
    v = torch.empty(s, b, problem.kv_heads, problem.v_head_dim, dtype=problem.dtype, device=_NO_DATA)
    alike.provider.build(mesh, counter, problem, alike.options).forward(Queries(q), KeyValues(k, v))
    return counter.pairs
