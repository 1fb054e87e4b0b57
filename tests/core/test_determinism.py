"""Two runs give the same bits, in every method on each of its layouts: whatever order ranks happen to run in."""

from __future__ import annotations

import pytest
import torch
from oracle import Case
from thread_ranks import on_threads
from torch import Tensor

from cp_plugin import ContextParallel, Options
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("provider", providers.names())
def test_two_runs(provider: str, dtype: torch.dtype) -> None:
    problem = Case(seq_length=128, heads=8, kv_heads=4, causal=True, dtype=dtype)
    for layout in providers.get(provider).layouts:
        first, again = (on_threads(provider, 4, problem, layout=layout) for _ in range(2))
        for one, other in zip(first, again, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one[:4], other[:4], strict=True)), layout


@pytest.mark.parametrize("provider", providers.names("linear"))
def test_two_runs_of_linear_attention(provider: str) -> None:
    def rank(mesh: Mesh) -> list[Tensor]:
        cp = ContextParallel(provider, mesh=mesh, layout=layout)
        leaves = [cp.shard(x).detach().requires_grad_() for x in problem.inputs()[:3]]
        out = cp.linear_attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, cp.shard(problem.inputs()[3]))]

    problem = Case(seq_length=128, heads=8, kv_heads=4, causal=True, dtype=torch.float32)
    axes = providers.get(provider).axes(4, Options())
    for layout in providers.get(provider).layouts:
        first, again = (run_threads(rank, axes) for _ in range(2))
        for one, other in zip(first, again, strict=True):
            assert all(map(torch.equal, one, other)), layout
