"""Every provider with our own kernels in the place of a library's: layouts, masks, the ring's running partials."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem, backends, providers
from cp_plugin.backends.triton import Triton
from cp_plugin.mask import Mask
from cp_plugin.mesh import Mesh, run_threads
from cp_plugin.moves import no_gradients, nothing_seen
from cp_plugin.protocol import own

CPU = torch.device("cpu")
TOKENS = 48
MASKS = {
    "causal": {"causal": True},
    "window and documents": {"causal": True, "window": (7, 0), "documents": (0, 5, 20, TOKENS)},
}


def reference(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> tuple[Tensor, ...]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    positions = torch.arange(TOKENS)
    apart = positions[:, None] - positions
    hidden = (apart < -(TOKENS if mask.right is None else mask.right)) | (
        apart > (TOKENS if mask.left is None else mask.left)
    )
    for start, end in pairwise(mask.documents):
        inside = (positions >= start) & (positions < end)
        hidden |= inside[:, None] != inside
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k.repeat_interleave(q.size(2) // k.size(2), 2)) * 0.25
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,kbhe->qbhe", weights, v.repeat_interleave(q.size(2) // k.size(2), 2))
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter knows one thread."""
    lock = threading.Lock()

    def locked(call: Callable[..., Any]) -> Callable[..., Any]:
        def locked_call(*args: Any) -> Any:
            with lock:
                return call(*args)

        return locked_call

    for name in ("attend", "gradients"):
        monkeypatch.setattr(Triton, name, locked(getattr(Triton, name)))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("provider", providers.names())
def test_provider_equals_reference(provider: str, mask: dict) -> None:
    problem = Problem(size=4, heads=4, kv_heads=4, head_dim=16, seq_length=TOKENS, dtype=torch.float32)
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(TOKENS, 1, 4, 16, generator=g) for _ in range(4)]
    of = Mask.of(mask["causal"], mask.get("window"), mask.get("documents", ()))
    settled = providers.settle(provider, problem, Options(backend="triton"))

    def rank(mesh: Mesh) -> list[Tensor]:
        cp = ContextParallel(provider, mesh=mesh, problem=problem, backend="triton")
        q, k, v, dout = (cp.shard(x) for x in whole)
        call = cp.problem(q, k, v, causal=mask["causal"])
        call = replace(call, window=mask.get("window"), documents="documents" in mask)
        method = cp.method(call, CPU, 0.25, mask.get("documents", ()))
        out, lse = method.forward(q, k, v, own, own) or nothing_seen(q, v)
        delta = (dout * out).sum(-1)
        grads = method.backward(dout, q, k, v, lse, delta, own, own) or no_gradients(q, k, v)
        return [cp.unshard(x) for x in (out, *grads)]

    got = run_threads(rank, settled.provider.axes(4, settled.options), patience=300)[0]
    for a, b in zip(got, reference(*whole, of), strict=True):
        assert (a.double() - b).norm() <= 1e-6 * b.norm()


def test_it_is_asked_for_by_name_and_refuses_what_it_cannot() -> None:
    chosen, reason = backends.choose("triton", CPU, torch.bfloat16, 192, 128)
    assert isinstance(chosen, Triton) and reason == "asked for"
    for dtype, size, why in ((torch.float64, 64, "not torch.float64"), (torch.bfloat16, 512, "up to 256, not 512")):
        with pytest.raises(ValueError, match=rf"--cp-backend triton cannot run here: .*{why}.*use --cp-backend"):
            backends.choose("triton", CPU, dtype, size, size)
