"""Scans against a loop and a running sum in float64, precision at 128k tokens, kernel and memory counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from linear_cases import DECAYS, LinearCase
from nightly import nightly
from oracle import relative_error
from torch import Tensor

from cp_plugin.engine.linear import decayed, products, recurrence, rules, scan, segment
from cp_plugin.engine.linear.tokens import Tokens
from cp_plugin.planner.trace.memory import Meter

LONG = 2**17


def one_by_one(left: Tensor, factor: Tensor | None, initial: Tensor) -> Tensor:
    states = [initial]
    for i in range(left.size(0)):
        states.append(segment.advance(states[-1], left[i], None if factor is None else factor[i]))
    return torch.stack(states)


@pytest.mark.parametrize("x", [None, (1, 1), (4, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("n", [*range(1, 10), 64, 129])
def test_states_equal_the_loop(n: int, x: tuple[int, int] | None) -> None:
    torch.manual_seed(n)
    left = torch.randn(n, 2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    initial = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    leaves, factor = [left, initial], None
    if x is not None:
        factor = torch.rand(n, 2, 3, *x, dtype=torch.float64) / x[1]
        factor[torch.rand(n) < 0.2] = 0  # documents, or a decay that nothing survives
        leaves.append(factor.requires_grad_())
    got, want = scan.states(left, factor, initial), one_by_one(left, factor, initial)
    dout = torch.randn_like(want)
    grads, wanted = (torch.autograd.grad(y, leaves, dout) for y in (got, want))
    for a, b in zip((got, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scan.states(left, factor)[0], torch.zeros_like(initial), rtol=0, atol=0)


def running_sums(y: Tensor, dim: int) -> Tensor:
    """``cumsum`` in the dtype of y, as on CUDA along all but the last dimension; the CPU accumulates in float64."""
    total, sums = torch.zeros_like(y.select(dim, 0)), []
    for addend in y.unbind(dim):
        total = total + addend
        sums.append(total)
    return torch.stack(sums, dim)


KINDS = {
    "nearly none": lambda noise: torch.full_like(noise, -1e-5),
    "mild": lambda noise: -noise * torch.logspace(-7, -2, 8),
    "gates": lambda noise: torch.nn.functional.logsigmoid(noise * 20 - 4) / 16,
    "strong between weak": lambda noise: torch.where(noise > 0.999, -1e4, -noise * torch.logspace(-6, 0, 8)),
    "none": torch.zeros_like,
    "per head": lambda noise: torch.full_like(noise, -1e-3) * torch.linspace(0, 1, 8),
}


def log_decays(kind: str) -> Tensor:
    """``[128k, 1, 1, 8]`` in float32."""
    return KINDS[kind](torch.rand(LONG, 1, 1, 8, generator=torch.Generator().manual_seed(0)))


def weights(decay: Tensor, dtype: torch.dtype) -> decayed.Edges:
    zeros = torch.zeros(1, 1, 1, 8, dtype=dtype).expand(*decay.shape[:3], 8)
    edges = decayed.edges(Tokens(zeros, zeros, zeros, decay))
    assert all(y is not None and y.dtype == dtype for y in edges)
    return edges


def error(decay: Tensor, monkeypatch: pytest.MonkeyPatch) -> float:
    """Largest float32 error of the weights (all at most 1), with running sums as on CUDA."""
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "cumsum", running_sums)
        got = weights(decay, torch.float32)
    pairs = zip(got, weights(decay, torch.float64), strict=True)
    return max((a.double() - b).abs().max().item() for a, b in pairs)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_128k_tokens_in_float32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(log_decays(kind), monkeypatch) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_float64_inputs_keep_float64(kind: str) -> None:
    decay = log_decays(kind).double()
    read, write, factor = weights(decay, torch.float64)
    running, back = decay.cumsum(0), decay.flip(0).cumsum(0).flip(0) - decay
    for got, want in ((read, running), (write, back), (factor, running[-1])):
        assert got is not None
        torch.testing.assert_close(got, want.exp(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("x", [1, 8])
def test_chunks_in_float32(x: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the float64 recurrence: 256 tokens, strong decays between weak ones."""
    g = torch.Generator().manual_seed(0)
    q, k, v, noise = (torch.randn(256, 1, 2, 8, generator=g) for _ in range(4))
    decay = torch.where(noise > 1, -1e4, -noise.abs() * 1e-2)[..., :x]
    want = recurrence.forward(Tokens(q.double(), k.double(), v.double(), decay.double()))
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "cumsum", running_sums)
        assert relative_error(rules.forward(Tokens(q, k, v, decay)), want) <= 1e-6


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_slabs_change_nothing(decay: Any, delta: bool, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LinearCase(decay=decay, delta=delta, documents=documents, seq_length=300)
    *inputs, dout = case.inputs()
    x = case.make_tokens(*inputs)
    want = (rules.forward(x), *segment.recomputed(rules.forward, dout, x))
    monkeypatch.setattr(products, "HELD", 3 * 4 * 64**2)  # of the ten chunks, three at one time
    for a, b in zip((rules.forward(x), *segment.recomputed(rules.forward, dout, x)), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@nightly
def test_memory_of_gla_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Key-by-key products exist for one slab only; other memory grows with the tokens."""

    def backward(tokens: int) -> int:
        """Bytes at the peak."""
        x = Tokens(*(torch.zeros(tokens, 1, 2, 32, device="meta") for _ in range(4)))
        with Meter() as meter:
            segment.recomputed(rules.forward, x.v, x)
        return meter.peak

    tokens, of_token = 2**14, 2 * 32 * 16 * 4  # bytes of the products of one token, in float32
    assert backward(tokens) > 3 * of_token * tokens, "one slab"
    monkeypatch.setattr(products, "HELD", 2**18)
    assert backward(2 * tokens) - backward(tokens) < 1.25 * of_token * tokens
