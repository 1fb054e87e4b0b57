"""Keys and values with heads of different sizes, as in multi-latent attention: kernels, providers, traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Case, Result, assert_close, relative_error
from thread_ranks import typical

from cp_plugin import ContextParallel, Options
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.kernels import backends
from cp_plugin.methods import registry as providers

SIZES = {"smaller values": (24, 16), "larger values": (16, 24)}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in providers.names()},
    "ring on zigzag": ("ring", {"layout": "zigzag"}),
    "usp with a ring": ("usp", {"head_parallel": 2}),
    "head axis, then a grid": ("attention2d", {"head_parallel": 2, "grid": (1, 2)}),
    "grid in head groups": ("attention2d", {"grid": (2, 2), "head_groups": 2}),
    "queries travel": ("burst", {"intra_size": 2, "backward": "q"}),
}
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}

Traffic = dict[tuple[str, str], int]
sizes = pytest.mark.parametrize("sizes", SIZES)


def case(sizes: str, *, causal: bool = True, dtype: torch.dtype = torch.float64, kv_heads: int = 4) -> Case:
    d, e = SIZES[sizes]
    return Case(seq_length=64, heads=8, kv_heads=kv_heads, causal=causal, dtype=dtype, head_dim=d, v_head_dim=e)


@sizes
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_one_call_of_the_kernel(dtype: torch.dtype, causal: bool, sizes: str) -> None:
    problem = case(sizes, causal=causal, dtype=dtype)
    q, k, v, dout = problem.inputs()
    sdpa, diagonal, scale = backends.get("sdpa"), 0 if causal else q.size(0), problem.head_dim**-0.5
    out, lse = sdpa.forward(q, k, v, diagonal, scale)
    wide = accumulation_dtype(dtype)
    term = sdpa.row_term(dout, (dout.to(wide) * out.to(wide)).sum(-1))
    grads = sdpa.backward(dout, q, k, v, lse, term, diagonal, scale)
    assert all(x.stride(-1) == 1 for x in (out, *grads))
    assert_close(Result(out, *grads), problem.reference(), LIMITS[dtype], sizes)
    assert relative_error(lse, backends.get("reference").forward(q, k, v, diagonal, scale)[1]) <= LIMITS[dtype]


@sizes
@pytest.mark.parametrize("method", METHODS)
def test_every_provider(method: str, sizes: str) -> None:
    """On 4 ranks: the oracle's numbers, by the padded kernel and by one that takes both sizes; the formula's bytes."""
    provider, options = METHODS[method]
    for dtype, backend in ((torch.float64, "sdpa"), (torch.float64, "reference"), (torch.float32, "sdpa")):
        problem = case(sizes, dtype=dtype)
        want = problem.reference()
        for index, (got, sent, formula) in enumerate(on_ranks(provider, problem, backend=backend, **options)):
            assert_close(got, want, {torch.float64: 1e-10, torch.float32: 1e-5}[dtype], (method, backend, index))
            assert sent == formula, (method, index)


def test_heads_that_the_axis_must_repeat() -> None:
    problem = case("smaller values", kv_heads=1)
    for got, sent, formula in on_ranks("ulysses", problem):
        assert_close(got, problem.reference(), 1e-10, "one key/value head on 4 ranks")
        assert sent == formula


def on_ranks(provider: str, problem: Case, **options: Any) -> list[tuple[Result, Traffic, Traffic]]:
    """What each of 4 ranks found, sent, and should have sent."""
    described = typical(problem, 4)
    settled = providers.settle(provider, described, Options(**options))

    def rank(mesh: Mesh) -> tuple[Result, Traffic, Traffic]:
        cp = ContextParallel(provider, mesh=mesh, problem=described, **options)
        q, k, v, dout = (cp.shard(x) for x in problem.inputs())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = cp.attention(*leaves)
        grads = torch.autograd.grad(out, leaves, dout)
        sent: Traffic = {}
        for line in mesh.ledger.entries():
            sent[line.phase, line.axis] = sent.get((line.phase, line.axis), 0) + line.bytes
        formula = cp.provider.traffic(cp.problem(q, k, v, causal=True), cp.options, cp.index)
        return Result(*(cp.unshard(x.detach()) for x in (out, *grads))), sent, dict(formula)

    return run_threads(rank, settled.axes)
