"""Programs to run under the model: attention of every kind, twice, like two layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from equipment.nccl.model import Program, second_mesh
from linear_cases import LinearCase, sharded
from oracle import Case
from thread_ranks import typical
from torch import Tensor

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.shift import shift
from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.inference import Session, slots_for, tree
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.local import Local

LAYERS = 2


def meshes(provider: str, size: int, case: Case, **options: Any) -> tuple[dict[str, int], tuple[str, ...]]:
    """The axes and extra groups of a provider's mesh."""
    settled = providers.settle(provider, typical(case, size), Options(**options))
    return settled.axes, tuple(settled.provider.extra_groups)


def attention(provider: str, case: Case, **options: Any) -> Program[None]:
    """Softmax attention, forward through all layers and backward."""

    def program(mesh: Mesh) -> None:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(case, mesh.size), **options)
        inputs = [cp.shard(x) for x in case.inputs()]
        documents = torch.tensor(case.documents, dtype=torch.int32) if case.documents else None
        _run_layers(
            lambda *qkv: cp.attention(*qkv, causal=case.causal, window=case.window, cu_seqlens=documents), *inputs
        )

    return program


def linear_attention(provider: str, case: LinearCase, layout: str) -> Program[None]:
    """The same for linear attention."""

    def program(mesh: Mesh) -> None:
        cp = ContextParallel(provider, mesh=mesh, layout=layout)
        *inputs, dout = case.inputs(torch.float32)
        q, k, v, decay, beta = (None if x is None else sharded(cp, x) for x in inputs)
        more = {"beta": beta, "causal": case.causal, "cu_seqlens": case.cu_seqlens}
        _run_layers(lambda *qkv: cp.linear_attention(*qkv, decay, **more), q, k, v, cp.shard(dout))

    return program


def _run_layers(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    """Forward through all layers and backward."""
    outs = [attend(*(x.detach().requires_grad_() for x in (q, k, v))) for _ in range(LAYERS)]
    for out in reversed(outs):
        out.backward(dout)


def shifted(provider: str, size: int, layout: str) -> Program[None]:
    """Tokens and gradients of multi-token prediction, by one and by two."""
    case = Case(seq_length=4 * size, heads=size, kv_heads=size, causal=True)

    def program(mesh: Mesh) -> None:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(case, size), layout=layout)
        x = torch.randn(4, 3, requires_grad=True)
        for by in (1, 2, -1):
            shift(cp, x, 0, by).sum().backward()

    return program


def decoded(mesh: Mesh) -> None:
    """One token through two layers: partial attention, merged along the tree."""
    for _ in range(LAYERS):
        tree.merged(mesh, Partial(torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4)))


def session(provider: str, size: int, layout: str) -> Program[None]:
    """Inference: a prompt in two chunks, then single tokens over a group that decoding is the first to use."""
    tokens = 2 * size * 2

    def program(mesh: Mesh) -> None:
        case = Case(seq_length=tokens, heads=4, kv_heads=4, causal=True)
        cp = ContextParallel(provider, mesh=mesh, problem=typical(case, size), layout=layout)
        cache = Session(cp, batch=1, capacity=slots_for(2 * tokens + 3, size), mesh=second_mesh({"cp": size}))
        x = torch.randn(tokens, 1, 4, 8)
        for _ in range(2):
            with cache.prefill(tokens):
                for layer in range(LAYERS):
                    cache.attend(layer, *(cp.shard(x),) * 3)
        cache.close([2 * tokens])
        for _ in range(3):
            with cache.decode():
                for layer in range(LAYERS):
                    cache.attend(layer, *(x[:1],) * 3)

    return program


@contextmanager
def cheap_kernels() -> Iterator[None]:
    """Local attention reads its inputs and computes nothing: order and buffers of many ranks in little time."""

    def forward(self: Local, queries: Queries, kv: KeyValues, onto: Any = None) -> Partial:
        q, v = queries.q, kv.v
        _look_at(q, *kv.tensors)
        if onto is not None:
            return Partial(onto.out.add_(0), onto.lse.add_(0))
        wide = accumulation_dtype(q.dtype)
        return Partial(q.new_zeros((*q.shape[:3], v.size(3)), dtype=wide), q.new_zeros(q.shape[:3], dtype=wide))

    def backward(self: Local, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients:
        _look_at(*queries.tensors, *kv.tensors)
        return Gradients(*(_summed(x, total) for x, total in zip((queries.q, *kv.tensors), onto, strict=True)))

    with patch.object(Local, "forward", forward), patch.object(Local, "backward", backward):
        yield


def _summed(like: Tensor, total: Tensor | None) -> Tensor:
    """In the total's memory, like kernels."""
    return torch.zeros_like(like, dtype=accumulation_dtype(like.dtype)) if total is None else total.add_(0)


def _look_at(*tensors: Tensor) -> None:
    for t in tensors:
        t.sum()
