"""One attention case on ranks that are threads of this process."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Case, Result

from cp_plugin import ContextParallel, Options, Problem, providers
from cp_plugin.mesh import Mesh, run_threads


def run(cp: ContextParallel, problem: Case) -> Result:
    """Forward and backward through autograd on this rank's shards; the whole result."""
    q, k, v, dout = (cp.shard(x) for x in problem.inputs())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sink = problem.sinks()
    if sink is not None:
        leaves.append(sink.requires_grad_())
    cu_seqlens = torch.tensor(problem.documents, dtype=torch.int32) if problem.documents else None
    out = cp.attention(*leaves[:3], causal=problem.causal, window=problem.window, cu_seqlens=cu_seqlens, sink=sink)
    assert out.dtype == problem.dtype
    grads = torch.autograd.grad(out, leaves, dout)
    return Result(*(cp.unshard(x.detach()) for x in (out, *grads[:3])), *grads[3:])


def typical(problem: Case, size: int) -> Problem:
    return Problem(
        size=size, heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim, dtype=problem.dtype
    )


def on_threads(provider: str, size: int, problem: Case, **options: Any) -> list[Result]:
    settled = providers.settle(provider, typical(problem, size), Options(**options))

    def rank(mesh: Mesh) -> Result:
        return run(ContextParallel(provider, mesh=mesh, problem=typical(problem, size), **options), problem)

    return run_threads(rank, settled.provider.axes(size, settled.options))
