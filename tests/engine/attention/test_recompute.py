"""Recomputation reuses what attention computed and received: same gradients, no kernel or byte twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import Case
from thread_ranks import typical
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.recompute import Recomputed, once
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.kernels.backends.sdpa import Sdpa
from cp_plugin.engine.methods import registry as providers

CASE = Case(seq_length=64, heads=4, kv_heads=2, causal=True, dtype=torch.float64)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "grid": ("attention2d", {"grid": (2, 2)}),
    "grid that moves keys": ("attention2d", {"grid": (2, 2), "layout": "zigzag"}),
    "usp": ("usp", {"head_parallel": 2}),
    "gather": ("all_gather", {"head_groups": 2}),
    "double ring behind a head axis": ("double_ring", {"head_parallel": 2, "intra_size": 2}),
    **{
        f"{name} on {layout}": (name, {"layout": layout})
        for name in [*providers.names(), *providers.names("linear")]
        for layout in providers.get(name).layouts
    },
}
Run = Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Tensor]


def plainly(function: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Tensor:
    return function(*x)


def reentrant(function: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Tensor:
    return checkpoint(Recomputed(function), *x, use_reentrant=True)


def with_hooks(function: Callable[..., Tensor], x: tuple[Tensor, ...]) -> Tensor:
    return checkpoint(Recomputed(function), *x, use_reentrant=False)


def two_micro_batches(call: Callable[..., Tensor], cp: ContextParallel, how: Run) -> list[Tensor]:
    """Two forwards, then two backwards, first in first out as in a pipeline. All gradients and both outputs."""
    batches = []
    for factor in (1.0, 0.5):
        q, k, v, dout = (cp.shard(x) for x in CASE.inputs())
        leaves = tuple((x * factor).detach().requires_grad_() for x in (q, k, v))
        out = how(lambda q, k, v: call(2 * q, k, v).sin(), leaves)
        batches.append((leaves, out, dout))
    for _, out, dout in batches:
        out.backward(dout)
    return [x for leaves, out, _ in batches for x in (out.detach(), *(y.grad for y in leaves))]


def train_on_ranks(name: str, how: Run) -> list[tuple[list[Tensor], int]]:
    """Per rank: outputs and gradients, and the bytes sent forward."""
    provider, options = METHODS[name]
    settled = providers.settle(provider, typical(CASE, 4), Options(**options))

    def rank(mesh: Mesh) -> tuple[list[Tensor], int]:
        cp = ContextParallel(provider, mesh=mesh, problem=typical(CASE, 4), **options)
        call = cp.attention if settled.provider.kind == "softmax" else cp.linear_attention
        return two_micro_batches(call, cp, how), mesh.ledger.bytes(phase="forward")

    return run_threads(rank, settled.axes)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per forward of the kernel."""
    called: list[str] = []
    original = Sdpa.forward
    monkeypatch.setattr(Sdpa, "forward", lambda self, *args: (called.append(""), original(self, *args))[1])
    return called


@pytest.mark.parametrize("how", [reentrant, with_hooks])
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_repeated(name: str, how: Run, kernels: list[str]) -> None:
    """And two runs of every method on each of its layouts give the same bits, whatever the order in which ranks run."""
    want = train_on_ranks(name, plainly)
    calls = len(kernels)
    got = train_on_ranks(name, how)
    linear = providers.get(METHODS[name][0]).kind == "linear"
    assert len(kernels) == 2 * calls and bool(calls) != linear and any(sent for _, sent in got)
    for (tensors, sent), (expected, sent_plainly) in zip(got, want, strict=True):
        assert sent == sent_plainly
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))


def test_kept_results_are_freed_by_the_backward() -> None:
    kept = []

    def attention(x: Tensor) -> Tensor:
        sines = once(x.sin)
        kept.append(weakref.ref(sines))
        return x * sines

    x = torch.ones(4, requires_grad=True)
    out = reentrant(attention, (x,))
    assert kept[0]() is not None
    out.sum().backward()
    gc.collect()
    assert kept[0]() is None and kept[1]() is None
    torch.testing.assert_close(x.grad, torch.ones(4).sin(), rtol=0, atol=0)
    with torch.no_grad():
        reentrant(attention, (x,))
    assert kept[2]() is None


def test_nested_and_repeated_runs() -> None:
    numbers = iter(range(100))
    inner = Recomputed(lambda: once(lambda: next(numbers)))
    outer = Recomputed(lambda: [once(lambda: next(numbers)), inner(), once(lambda: next(numbers))])
    assert outer() == [0, 1, 2]
    assert inner() == 1, "its own backward comes between the two runs of the other"
    inner = Recomputed(lambda: once(lambda: next(numbers)))
    assert outer() == [0, 1, 2]
    assert inner() == 1, "it kept what the other repeated"
    assert outer() == [3, 4, 5], "a third run computes"
    assert once(lambda: next(numbers)) == 6, "as does whoever is not wrapped"


def test_runs_that_do_not_match_are_refused() -> None:
    times = iter((2, 1, 1, 2))
    function = lambda: [once(lambda: 0) for _ in range(next(times))]  # noqa: E731
    longer, shorter = Recomputed(function), Recomputed(function)
    longer()
    with pytest.raises(RuntimeError, match="left 1 attention results unused"):
        longer()
    shorter()
    with pytest.raises(RuntimeError, match="requested more attention results than were kept"):
        shorter()
