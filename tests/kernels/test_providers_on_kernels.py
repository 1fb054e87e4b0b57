"""Providers on our own kernels: layouts, masks, running partials."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from brute import Inputs, answer
from cp_kernels.visible import View
from nightly import nightly
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.methods import registry as providers

TOKENS = 48
MASKS = {"causal": View(right=0), "window and documents": View(7, 0, (0, 5, 20, TOKENS))}
EVERY_CHANGE = (("ring", "window and documents"), ("attention2d", "causal"), ("needed", "window and documents"))
"""Running partials, merged partials and fetched keys."""


def _marked(provider: str, mask: str) -> object:
    few, name = (provider, mask) in EVERY_CHANGE, f"{provider}-{mask}"
    return pytest.param(provider, MASKS[mask], id=name, marks=() if few else nightly)


@pytest.mark.parametrize(("provider", "view"), [_marked(*pair) for pair in product(providers.names(), MASKS)])
def test_provider_equals_reference(provider: str, view: View) -> None:
    heads = 4 if provider in ("ulysses", "usp") else 2
    problem = Problem(size=4, heads=heads, kv_heads=heads, head_dim=16, seq_length=TOKENS, dtype=torch.float32)
    tokens = (range(TOKENS),)
    whole = Inputs.random(tokens, tokens, heads=(heads, heads))
    want = answer(whole, tokens, tokens, view, 0.25)
    settled = providers.settle(provider, problem, Options(backend="triton"))
    window = None if view.left is None else (view.left, 0)
    bounds = torch.tensor(view.documents) if view.documents else None

    def rank(mesh: Mesh) -> list[Tensor]:
        cp = ContextParallel(provider, mesh=mesh, problem=problem, backend="triton")
        *leaves, dout = (cp.shard(x).requires_grad_() for x in whole)
        out = cp.attention(*leaves, causal=True, window=window, cu_seqlens=bounds)
        return [cp.unshard(x) for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.detach()))]

    got = run_threads(rank, settled.axes, patience=300)[0]
    for a, b in zip(got, (want.out, want.dq, want.dk, want.dv), strict=True):
        assert (a.double() - b).norm() <= 1e-6 * b.norm()
