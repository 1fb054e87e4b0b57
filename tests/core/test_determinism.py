"""Two runs give the same bits, in every method on each of its layouts, whatever the order in which ranks run."""

from __future__ import annotations

import pytest
import torch
from nightly import slow
from oracle import Case
from thread_ranks import on_threads
from torch import Tensor

from cp_plugin import ContextParallel, Options
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers

DTYPES = (torch.float32, torch.bfloat16)
METHODS = [pytest.param(n, t, marks=slow if t == torch.bfloat16 else ()) for n in providers.names() for t in DTYPES]


@pytest.mark.parametrize(("provider", "dtype"), [*METHODS, *((n, torch.float32) for n in providers.names("linear"))])
def test_two_runs(provider: str, dtype: torch.dtype) -> None:
    found = providers.get(provider)
    case = Case(seq_length=128, heads=8, kv_heads=4, causal=True, dtype=dtype)

    def linear(mesh: Mesh) -> list[Tensor]:
        cp = ContextParallel(provider, mesh=mesh, layout=layout)
        leaves = [cp.shard(x).detach().requires_grad_() for x in case.inputs()[:3]]
        out = cp.linear_attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, cp.shard(case.inputs()[3]))]

    def run() -> list[list[Tensor]]:
        if found.kind == "linear":
            return run_threads(linear, found.axes(4, Options()))
        return [list(result[:4]) for result in on_threads(provider, 4, case, layout=layout)]

    for layout in found.layouts:
        for one, other in zip(run(), run(), strict=True):
            assert all(map(torch.equal, one, other)), layout
