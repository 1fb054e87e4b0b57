"""An attention case on ranks that are threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from oracle import Case, Result
from torch.utils.checkpoint import checkpoint

from cp_plugin import ContextParallel, Options, Problem, Tree
from cp_plugin.engine.attention.packs import place_documents
from cp_plugin.engine.attention.recompute import Recomputed
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.placement.documents import DOCUMENTS


def run(cp: ContextParallel, problem: Case, *, recompute: bool = False) -> Result:
    """Forward and backward through autograd on this rank's shards; the whole result."""
    cu_seqlens = torch.tensor(problem.documents, dtype=torch.int32) if problem.documents else None
    if cu_seqlens is not None and cp.layout == DOCUMENTS:
        cp = place_documents(cp, cu_seqlens)
    q, k, v, dout = (cp.shard(x) for x in problem.inputs())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sink = problem.sinks()
    if sink is not None:
        leaves.append(sink.requires_grad_())
    asked = {"causal": problem.causal, "window": problem.window, "cu_seqlens": cu_seqlens, "sink": sink}
    if problem.tree[0]:
        asked["tree"] = Tree(*problem.tree)
    if recompute:
        out = checkpoint(Recomputed(partial(cp.attention, **asked)), *leaves[:3], use_reentrant=False)
    else:
        out = cp.attention(*leaves[:3], **asked)
    assert out.dtype == problem.dtype
    grads = torch.autograd.grad(out, leaves, dout)
    return Result(*(cp.unshard(x.detach()) for x in (out, *grads[:3])), *grads[3:])


def on_shards(cp: ContextParallel, case: Case) -> Result:
    """Forward and backward on this rank's shards, without a window, documents or a sink; its shards of the result."""
    q, k, v, dout = (cp.shard(x) for x in case.inputs())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = cp.attention(*leaves, causal=case.causal)
    out.backward(dout)
    return Result(out.detach(), *(x.grad for x in leaves))


def typical(problem: Case, size: int) -> Problem:
    return Problem(
        size=size,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        v_head_dim=problem.v_head_dim,
        dtype=problem.dtype,
        causal=problem.causal,
        window=problem.window,
        documents=bool(problem.documents or problem.tree[0]),
        sink=problem.sink,
    )


def on_threads(
    provider: str,
    size: int,
    problem: Case,
    *,
    recompute: bool = False,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> list[Result]:
    """within: entered by every rank around its call."""
    settled = providers.settle(provider, typical(problem, size), Options(**options))

    def rank(mesh: Mesh) -> Result:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(problem, size), **options)
        with within():
            return run(cp, problem, recompute=recompute)

    return run_threads(rank, settled.axes)
