"""Calls of providers: what is checked or timed of them, what cannot run, and how one rank runs without its peers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.calls import Inputs, Setup
from cp_plugin.engine.comm import TraceMesh
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.problem import CallInfo, Problem
from cp_plugin.engine.core.values import Gradients, KeyValues, Partial, Queries
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.methods.moves import no_gradients, nothing_seen
from cp_plugin.engine.methods.protocol import Attend
from cp_plugin.testing import verify

ONLY_A_REFERENCE = "the reference for the others: plain torch, one score matrix after another"
USUAL = Problem(size=1)


def kernel(name: str, d: int, e: int) -> str:
    """What the check calls a kernel of attention for these head sizes in ``of``."""
    return f"kernel {name} for heads of {d}/{e}"


def provider(name: str) -> str:
    """What the check calls a provider in ``of``."""
    return f"provider {name}"


def parts_of(setup: Setup) -> tuple[str, ...]:
    """The provider and the kernel of a setup, for ``of``."""
    problem = setup.problem
    return provider(setup.provider.name), kernel(setup.options.backend, problem.head_dim, problem.v_head_dim)


def timed_parts(setup: Setup, device: torch.device) -> tuple[str, ...]:
    """The same, with all kernels that ``auto`` may use."""
    problem = setup.problem
    names = blocks.choose(setup.options, problem, device).backends
    return *parts_of(setup), *(kernel(name, problem.head_dim, problem.v_head_dim) for name in names)


def normal(device: torch.device, *shape: int) -> Tensor:
    """Random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device)


def masked(problem: Problem, mask: str) -> tuple[Problem, tuple[int, ...]]:
    """The call with a mask, and its document bounds: ``causal``, ``full``, ``window``, ``documents``, or the last two
    joined by ``and``. Windows and documents end at arbitrary positions."""
    s = problem.seq_length
    bounds = (0, s // 9, s // 9 + 1, s // 2 + 3, s) if "documents" in mask else ()
    window = (s // 7, 0) if "window" in mask else None
    return replace(problem, causal=mask != "full", window=window, documents=bool(bounds)), bounds


def lacking(backend: str, device: torch.device, problem: Problem = USUAL) -> str:
    """Why a backend cannot compute such heads here, or ""."""
    if backend == "auto":
        return ""
    if backend == "reference":
        return ONLY_A_REFERENCE
    return backends.get(backend).unsupported(CallInfo.from_problem(problem, device)) or ""


def cannot(setup: Setup, device: torch.device) -> str:
    """Why a setup cannot run on a device, or "": the provider's reason, or that of the kernel it would use."""
    if setup.reason is not None:
        return setup.reason
    try:
        verify.check_kernel(setup, device)
    except ValueError as error:
        return str(error)
    return ""


def possible(device: torch.device) -> dict[str, str]:
    """Backend -> "" if it runs here, or the reason why not."""
    return {name: lacking(name, device) for name in backends.names()}


def attend(cp: ContextParallel, x: Inputs, problem: Problem, documents: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of this rank's tokens, without autograd."""
    method = cp.method(problem, x.q.device, Scores(x.q.size(3) ** -0.5), problem.mask(documents))
    return Alone(method, Inputs(*(y.detach() for y in x[:4])))()


class Alone(NamedTuple):
    """A method on one rank's shards; of ``rank_of``, whose peers send zeros, with real kernels."""

    method: Attend
    x: Inputs

    def forward(self) -> Partial:
        queries, kv = Queries(self.x.q), KeyValues(self.x.k, self.x.v)
        return self.method.forward(queries, kv) or nothing_seen(queries, kv)

    def backward(self, lse: Tensor, delta: Tensor) -> Gradients:
        q, k, v, dout, *_ = self.x
        queries, kv = Queries(q, dout, lse, delta), KeyValues(k, v)
        return self.method.backward(queries, kv) or no_gradients(queries, kv)

    def __call__(self) -> tuple[Tensor, ...]:
        """Forward and backward."""
        out, lse = self.forward()
        dtype, wide = self.x.q.dtype, lse.dtype
        delta = (self.x.dout.to(wide) * out.to(dtype).to(wide)).sum(-1)
        return tuple(y.to(dtype) for y in (out, *self.backward(lse, delta)))


def rank_of(setup: Setup, device: torch.device, documents: tuple[int, ...] = (), index: int = 1) -> Alone:
    """One rank of a provider on random shards."""
    problem = setup.problem
    cp = ContextParallel(setup, mesh=TraceMesh(setup.axes, index))
    method = cp.method(problem, device, Scores(problem.head_dim**-0.5), problem.mask(documents))
    empty = calls.shapes(problem, problem.seq_length // problem.size)[:4]
    return Alone(method, Inputs(*(torch.randn(y.shape, device=device).to(y.dtype) for y in empty)))
