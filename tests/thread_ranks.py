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


def run(cp: ContextParallel, case: Case, *, recompute: bool = False) -> Result:
    """Forward and backward through autograd on this rank's shards; the whole result."""
    if case.documents and cp.layout == DOCUMENTS:
        cp = place_documents(cp, torch.tensor(case.documents, dtype=torch.int32))
    *shards, dsink = run_on_shards(cp, case, recompute=recompute)
    return Result(*map(cp.unshard, shards), dsink)


def run_on_shards(cp: ContextParallel, case: Case, *, recompute: bool = False) -> Result:
    """Forward and backward through autograd on this rank's shards; its shards of the result."""
    *inputs, dout = (cp.shard(x) for x in case.inputs())
    leaves = [x.detach().requires_grad_() for x in inputs]
    if (sink := case.sinks()) is not None:
        leaves.append(sink.requires_grad_())
    bounds = torch.tensor(case.documents, dtype=torch.int32) if case.documents else None
    settings = {"causal": case.causal, "window": case.window, "cu_seqlens": bounds, "sink": sink}
    if case.tree[0]:
        settings["tree"] = Tree(*case.tree)
    attend = partial(cp.attention, **settings)
    out = checkpoint(Recomputed(attend), *leaves[:3], use_reentrant=False) if recompute else attend(*leaves[:3])
    assert out.dtype == case.dtype
    return Result(out.detach(), *torch.autograd.grad(out, leaves, dout))


def typical(case: Case, size: int) -> Problem:
    """Return the call's problem, on so many ranks."""
    same = ("heads", "kv_heads", "head_dim", "v_head_dim", "dtype", "causal", "window", "sink")
    documents = bool(case.documents or case.tree[0])
    return Problem(size=size, documents=documents, **{name: getattr(case, name) for name in same})


def run_on_threads(
    provider: str,
    size: int,
    problem: Case,
    *,
    recompute: bool = False,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
    **options: Any,
) -> list[Result]:
    """Attend on ranks that are threads; within: entered by every rank around its call."""
    settled = providers.settle(provider, typical(problem, size), Options(**options))

    def rank(mesh: Mesh) -> Result:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(problem, size), **options)
        with within():
            return run(cp, problem, recompute=recompute)

    return run_threads(rank, settled.axes)
