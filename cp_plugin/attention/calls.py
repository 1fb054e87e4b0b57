"""One attention call of a provider, softmax or linear: its inputs, and the call with and without autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.attention import linear as linear_attention
from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm import TraceMesh
from cp_plugin.core.block import Block, Scores
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.mask import Mask
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.kernels.backends import BlockKernel
from cp_plugin.methods import registry as providers
from cp_plugin.methods.moves import no_gradients, nothing_seen
from cp_plugin.methods.protocol import Attend, Provider


class Inputs(NamedTuple):
    """q, k, v and dout as in ``cp_plugin.methods.protocol``, and the log decay and beta of linear attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None

    def sharded(self, cp: ContextParallel, device: torch.device) -> Inputs:
        """This rank's shards of whole sequences, as leaves of an autograd graph."""
        shards = (y if y is None or y.dim() == 1 else cp.shard(y) for y in self)
        return Inputs(*(None if y is None else y.to(device).detach().requires_grad_() for y in shards))


def shapes(problem: Problem, tokens: int) -> Inputs:
    """The inputs for ``tokens`` tokens, as empty tensors on the meta device."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=problem.dtype, device="meta")

    s, b, h, g = tokens, problem.batch, problem.heads, problem.kv_heads
    k = empty(s, b, g, problem.head_dim)
    decays = {"none": None, "head": k[0, 0, :, 0], "token": k[..., 0], "key": k}
    q, v, dout = (
        empty(s, b, h, problem.head_dim),
        empty(s, b, g, problem.v_head_dim),
        empty(s, b, h, problem.v_head_dim),
    )
    return Inputs(q, k, v, dout, decays[problem.decay], k[..., 0] if problem.delta else None)


def without_peers(
    provider: str | Provider, problem: Problem, options: Options, index: int, kernel: BlockKernel
) -> Attend:
    """The method of rank ``index`` around a kernel, on a mesh without peers or data; ValueError for options that do not
    fit, or a problem that the provider does not support."""
    resolved = providers.settle(provider, problem, options)
    return ContextParallel(resolved, mesh=TraceMesh(resolved.axes, index)).around(kernel, problem)


def through_autograd(
    cp: ContextParallel,
    shards: Inputs,
    problem: Problem,
    between: Callable[[], object] = lambda: None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv and the gradients of a per-token decay and of beta, of this rank's shards.

    Args:
        between: called after the forward.
        cu_seqlens: bounds of the documents; None: the problem's.
    """
    if cu_seqlens is None and problem.bounds:
        cu_seqlens = torch.tensor(problem.bounds)
    leaves = [shards.q, shards.k, shards.v]
    if cp.provider.kind == "softmax":
        out = cp.attention(*leaves, causal=problem.causal, window=problem.window, cu_seqlens=cu_seqlens)
    else:
        decay, beta = shards.log_decay, shards.beta
        out = cp.linear_attention(*leaves, decay, beta=beta, causal=problem.causal, cu_seqlens=cu_seqlens)
        leaves += [decay] * (problem.decay in ("token", "key")) + [beta] * problem.delta
    between()
    return out.detach(), *torch.autograd.grad(out, leaves, shards.dout.detach())


def directly(cp: ContextParallel, shards: Inputs, problem: Problem) -> tuple[Tensor, ...]:
    """The same without autograd, which cannot run ranks that are threads on one CUDA device."""
    if cp.provider.kind == "linear":
        scan, parts = cp.scan(problem, shards.q.device)
        q, k, v, dout, *beside = shards
        found = linear_attention.directly((q, k, v, *beside), dout.detach(), scan, parts)
        return found[:4] + found[5:] if problem.decay == "head" else found
    q, k, v, dout = (y.detach() for y in shards[:4])
    method = cp.method(cp.problem(q, k, v, causal=problem.causal), q.device, Scores(q.size(3) ** -0.5))
    return of_method(method, q, k, v, dout)


def of_method(method: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of this rank's tokens, from one call of a method in each direction."""
    queries, kv = Queries(q), KeyValues(k, v)
    out, lse = method.forward(queries, kv) or nothing_seen(queries, kv)
    wide = accumulation_dtype(q.dtype)
    delta = (dout.to(wide) * out.to(q.dtype).to(wide)).sum(-1)
    grads = method.backward(Queries(q, dout, lse, delta), kv) or no_gradients(queries, kv)
    return tuple(y.to(q.dtype) for y in (out, *grads))


def of_kernel(
    kernel: BlockKernel,
    x: tuple[Tensor, ...],
    what: Mask | Block,
    sent: Callable[[Tensor], Tensor] = lambda out: out,
    between: Callable[[], object] = lambda: None,
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv from one call of a kernel in each direction.

    Args:
        x: q, k, v and dout.
        what: the block; or the mask of a whole sequence.
        sent: applied to out before the backward sees it.
        between: called after the forward.
    """
    q, k, v, dout = x
    wide = accumulation_dtype(q.dtype)
    whole = (range(q.size(0)),), (range(k.size(0)),)
    block = what if isinstance(what, Block) else Block(*whole, what, Scores(q.size(3) ** -0.5))
    found = kernel.forward(Queries(q), KeyValues(k, v), block)
    assert found is not None, "it finds the block empty"
    between()
    delta = (dout.to(wide) * sent(found.out).to(wide)).sum(-1)
    grads = kernel.backward(Queries(q, dout, found.lse, delta), KeyValues(k, v), block)
    assert grads is not None, "it finds the block empty"
    return found.out, *grads
