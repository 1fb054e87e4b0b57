"""One call of a provider on rank threads of one device, beside attention in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention import calls
from cp_plugin.attention.calls import Inputs
from cp_plugin.attention.setups import Setup
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.testing import oracle, verify


def errors(setup: Setup, documents: tuple[int, ...], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """Relative error (norm) of out, dq, dk and dv, and how large each may be, as in ``cp-plugin verify``."""
    right = answer(replace(setup.problem, size=1), documents, device)

    def rank(mesh: Mesh) -> tuple[Tensor, ...]:
        cp = ContextParallel(setup, mesh=mesh)
        shards = right.inputs.sharded(cp, device)
        return tuple(cp.unshard(x) for x in attend(cp, shards, setup.problem, documents))

    got = run_threads(rank, setup.axes, patience=100)[0]
    return oracle.relative_errors(got, right.want), verify.limits(setup, right, device)


def attend(cp: ContextParallel, x: Inputs, problem: Problem, documents: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of this rank's tokens, without autograd, which has one thread for a device."""
    q, k, v, dout = (y.detach() for y in x[:4])
    method = cp.method(problem, q.device, q.size(3) ** -0.5, problem.mask(documents))
    return calls.of_method(method, q, k, v, dout)


@lru_cache(maxsize=32)
def answer(problem: Problem, documents: tuple[int, ...], device: torch.device) -> oracle.Case:
    """As ``oracle.make_case``, but worked out on the device: a CPU takes seconds for it."""
    inputs, seen = oracle.make_inputs(problem), oracle.seen(problem, documents)
    on_device = (x.to(device) for x in inputs[:4])
    want = oracle.reference(*on_device, causal=problem.causal, seen=seen.to(device))
    return oracle.Case(inputs, tuple(x.cpu() for x in want), problem, documents)
