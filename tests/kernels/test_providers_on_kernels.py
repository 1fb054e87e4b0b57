"""Providers on our own kernels: layouts, masks, running partials."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from brute import Inputs, answer
from cp_kernels.visible import View
from nightly import nightly
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.attention import calls
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.methods import registry as providers

CPU = torch.device("cpu")
TOKENS = 48
MASKS = {
    "causal": {"causal": True},
    "window and documents": {"causal": True, "window": (7, 0), "documents": (0, 5, 20, TOKENS)},
}
EVERY_CHANGE = (("ring", "window and documents"), ("attention2d", "causal"), ("needed", "window and documents"))
"""Running partials, merged partials and fetched keys."""


def _marked(provider: str, mask: str) -> object:
    few, name = (provider, mask) in EVERY_CHANGE, f"{provider}-{mask}"
    return pytest.param(provider, MASKS[mask], id=name, marks=() if few else nightly)


@pytest.mark.parametrize(("provider", "mask"), [_marked(*pair) for pair in product(providers.names(), MASKS)])
def test_provider_equals_reference(provider: str, mask: dict) -> None:
    heads = 4 if provider in ("ulysses", "usp") else 2
    problem = Problem(size=4, heads=heads, kv_heads=heads, head_dim=16, seq_length=TOKENS, dtype=torch.float32)
    tokens = (range(TOKENS),)
    whole = Inputs.random(tokens, tokens, heads=(heads, heads))
    of = Mask.from_arguments(mask["causal"], mask.get("window"), mask.get("documents", ()))
    want = answer(whole, tokens, tokens, View(of.left, of.right, of.documents), 0.25)
    settled = providers.settle(provider, problem, Options(backend="triton"))

    def rank(mesh: Mesh) -> list[Tensor]:
        cp = ContextParallel(provider, mesh=mesh, problem=problem, backend="triton")
        q, k, v, dout = (cp.shard(x) for x in whole)
        call = cp.problem(q, k, v, causal=mask["causal"])
        call = replace(call, window=mask.get("window"), documents="documents" in mask)
        method = cp.method(call, CPU, Scores(0.25), call.mask(mask.get("documents", ())))
        return [cp.unshard(x) for x in calls.call_method(method, q, k, v, dout)]

    got = run_threads(rank, settled.axes, patience=300)[0]
    for a, b in zip(got, (want.out, want.dq, want.dk, want.dv), strict=True):
        assert (a.double() - b).norm() <= 1e-6 * b.norm()
