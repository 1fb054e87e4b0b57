"""Setups, and one attention call of a provider, softmax or linear.

A setup is a provider with resolved options for one problem, or the reason why it cannot do it: ``cp-plugin traffic``
and ``cp-plugin verify`` run through a list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import TraceMesh, axis_groups
from cp_plugin.engine.common.text import show_option
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.kernels.backends import BlockKernel
from cp_plugin.engine.linear.kernels import KERNELS
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import float32_unless_told
from cp_plugin.engine.methods.protocol import Attend, Kind, Provider
from cp_plugin.engine.methods.registry import Resolved
from cp_plugin.engine.placement.documents import DOCUMENTS, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Resolved):
    """Resolved options, and whether the provider can do the problem."""

    reason: str | None = None
    """Why it cannot (the options are then as given); None if it can."""

    @property
    def layout(self) -> str:
        """The name of the token layout."""
        return self.options.layout or self.provider.layouts[0]

    @property
    def communicators(self) -> int:
        """Process groups per rank; on NCCL each has buffers of its own."""
        return len(axis_groups(range(self.problem.size), self.axes, self.provider.extra_groups))

    def __str__(self) -> str:
        """``grid 8x8, head parallel 2``; values of 1 are left out."""
        chosen = providers.order_choices(replace(self.options, layout=None, backend="auto"))
        return ", ".join(
            f"{name.replace('_', ' ')} {show_option(value)}" for name, value in chosen.items() if value != 1
        )


def settled(provider: Provider, problem: Problem, options: Options) -> Setup:
    """The provider's setup; on the layout ``documents``, with tokens placed for the problem's documents; ValueError for
    options that do not fit the provider or the number of ranks, as ``providers.settle`` does."""
    if options.layout == DOCUMENTS.name and problem.bounds:
        problem = placed(problem)
    resolved = providers.settle(provider, problem, options)
    reason = providers.unsupported(resolved.provider, problem, resolved.options)
    try:
        providers.layout_for(resolved.provider, resolved.options).segments(problem.seq_length, problem.size, 0)
    except ValueError as indivisible:
        reason = reason or str(indivisible)
    return Setup(provider=resolved.provider, problem=problem, options=resolved.options, why=resolved.why, reason=reason)


def settled_or_reason(provider: Provider, problem: Problem, options: Options) -> Setup:
    """``settled``, with options that do not fit as the reason."""
    try:
        return settled(provider, problem, options)
    except ValueError as error:
        return Setup(provider=provider, problem=problem, options=options, reason=str(error))


def with_float32_sums(provider: Provider, problem: Problem, options: Options) -> Setup:
    """``settled_or_reason`` whatever the table of ``--cp-gradient-dtype`` says, to compare methods by their bytes."""
    setup = settled_or_reason(provider, problem, float32_unless_told(provider, options))
    return replace(setup, options=replace(setup.options, gradient_dtype=options.gradient_dtype))


def can_place(provider: Provider, problem: Problem) -> bool:
    """Return True if tokens can be placed for the problem's documents on this provider."""
    return DOCUMENTS.name in provider.layouts and bool(problem.bounds) and problem.causal and problem.size > 1


def placed(problem: Problem) -> Problem:
    """The problem on tokens placed for its documents and window."""
    left = problem.mask().left
    lengths = [end - start for start, end in pairwise(problem.bounds)]
    return replace(problem, placed=place(lengths, problem.size, per_host=problem.transport.per_host, left=left).layout)


def setups(chosen: Sequence[str | Provider], problem: Problem, options: Options) -> list[Setup]:
    """A setup for every chosen provider, or for all if none is chosen.

    Each gets the options it has; an option that none of them has is an error. Options that do not fit are an error for
    chosen providers and a reason for others. ValueError for an unknown provider, and as above.
    """
    candidates = [providers.get(p) if isinstance(p, str) else p for p in chosen or _all(options.backend)]
    for name, value in options.chosen.items():
        if not any(_has(p, name) for p in candidates):
            providers.settle(candidates[0], problem, Options(**{name: value}))
    settle = settled if chosen else settled_or_reason
    return [settle(p, problem, options_of(p, options)) for p in candidates]


def _all(backend: str) -> list[str]:
    """Providers whose kind of attention has that kernel; all for ``auto`` and for unknown names."""
    kernels: dict[Kind, Sequence[str]] = {"softmax": ["auto", *backends.names()], "linear": ["auto", *KERNELS]}
    kinds = [kind for kind, names in kernels.items() if backend in names] or kernels
    return [name for kind in kinds for name in providers.names(kind)]


def options_of(provider: Provider, options: Options) -> Options:
    """The options that the provider has."""
    return replace(options, **{name: None for name in options.chosen if not _has(provider, name)})


def _has(provider: Provider, name: str) -> bool:
    return name in provider.options or (name in providers.ANY_SOFTMAX and provider.kind == "softmax")


class Inputs(NamedTuple):
    """q, k, v and dout as in ``engine.methods.protocol``, and the log decay and beta of linear attention."""

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
    q, v, dout = (empty(s, b, *x) for x in ((h, problem.head_dim), (g, problem.v_head_dim), (h, problem.v_head_dim)))
    return Inputs(q, k, v, dout, decays[problem.decay], k[..., 0] if problem.delta else None)


def without_peers(
    provider: str | Provider, problem: Problem, options: Options, index: int, kernel: BlockKernel
) -> Attend:
    """The method of rank ``index`` around a kernel, on a mesh without peers or data; ValueError for options that do not
    fit, or a problem that the provider does not support."""
    resolved = providers.settle(provider, problem, options)
    return ContextParallel(resolved, mesh=TraceMesh(resolved.axes, index)).build_around(kernel, problem)


def call_through_autograd(
    cp: ContextParallel, shards: Inputs, problem: Problem, between: Callable[[], object] = lambda: None
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv and the gradients of a per-token decay and of beta, of this rank's shards.

    between: called after the forward.
    """
    cu_seqlens = torch.tensor(problem.bounds) if problem.bounds else None
    leaves = [shards.q, shards.k, shards.v]
    if cp.provider.kind == "softmax":
        out = cp.attention(*leaves, causal=problem.causal, window=problem.window, cu_seqlens=cu_seqlens)
    else:
        decay, beta = shards.log_decay, shards.beta
        out = cp.linear_attention(*leaves, decay, beta=beta, causal=problem.causal, cu_seqlens=cu_seqlens)
        leaves += [decay] * (problem.decay in ("token", "key")) + [beta] * problem.delta
    between()
    return out.detach(), *torch.autograd.grad(out, leaves, shards.dout.detach())


def call_kernel(
    kernel: BlockKernel,
    x: tuple[Tensor, ...],
    mask: Mask,
    sent: Callable[[Tensor], Tensor] = lambda out: out,
    between: Callable[[], object] = lambda: None,
) -> tuple[Tensor, ...]:
    """out, dq, dk, dv from one call of a kernel in each direction.

    Args:
        x: q, k, v and dout.
        mask: of the whole sequence.
        sent: applied to out before the backward pass sees it.
        between: called after the forward.
    """
    q, k, v, dout = x
    wide = accumulation_dtype(q.dtype)
    block = Block((range(q.size(0)),), (range(k.size(0)),), mask, Scores.from_call(q))
    partial = kernel.forward(Queries(q), KeyValues(k, v), block)
    assert partial is not None, "it finds the block empty"
    between()
    delta = (dout.to(wide) * sent(partial.out).to(wide)).sum(-1)
    grads = kernel.backward(Queries(q, dout, partial.lse, delta), KeyValues(k, v), block)
    assert grads is not None, "it finds the block empty"
    return partial.out, *grads
