"""Each kind of linear attention against its formula as a dense weight matrix, in float64; the adapter to fla."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log
from typing import Any

import fake_fla
import pytest
import torch
from library_signatures import versions
from oracle import no_sums_in_half
from torch import Tensor
from torch.nn.functional import elu, silu

from cp_plugin import ContextParallel
from cp_plugin.engine.linear import fla, recurrence
from cp_plugin.engine.linear.segment import detached, run_gradients
from cp_plugin.engine.linear.tokens import Tokens
from cp_plugin.engine.linear.variants import EPSILON, Heads, LinearAttention, get, variants

S, B, H, G, D = 12, 2, 4, 2, 8


def module(name: str, **heads: int) -> LinearAttention:
    torch.manual_seed(1)
    sizes = {"heads": H, "kv_heads": G, "head_dim": D, "v_head_dim": D, "layer": 1, "layers": 4} | heads
    layer = LinearAttention(get(name), Heads(**sizes)).double()
    for p in layer.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return layer


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((S, B, H, D), (S, B, G, D), (S, B, G, D), (S, B, G, D))
    q, k, v, gate = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    return q, k, v, gate


def apply(layer: LinearAttention, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Tensor:
    return layer(q, k, v, gate, ContextParallel("lasp2").linear_attention)


def weighted(weights: Callable[[Tensor, Tensor, int], Tensor], q: Tensor, k: Tensor, v: Tensor, divide: bool) -> Tensor:
    """Outputs from the matrix of weights ``[b, i, j]`` of each head; weights(q [s, b, d], k, head)."""
    outs = []
    for head in range(H):
        w = weights(q[:, :, head], k[:, :, head // 2], head).tril()
        out = torch.einsum("bij,jbe->ibe", w, v[:, :, head // 2])
        outs.append(out / (w.sum(2).T.unsqueeze(2) + EPSILON) if divide else out)
    return torch.stack(outs, 2)


def products(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("ibd,jbd->bij", q, k)


def steps() -> Tensor:
    return (torch.arange(S)[:, None] - torch.arange(S)).clamp(min=0).double()


def _based(layer: LinearAttention, a: Tensor, b: Tensor, head: int) -> Tensor:
    """The Taylor series of the exponential."""
    wq, wk = layer.q_features.projection[head], layer.k_features.projection[head // 2]
    x = products(a @ wq, b @ wk) / 4  # sqrt(16)
    return 1 + x + x**2 / 2


def _rebased(layer: LinearAttention, a: Tensor, b: Tensor, head: int) -> Tensor:
    """A learned square."""

    def mapped(features: torch.nn.Module, x: Tensor, head: int) -> Tensor:
        x = x @ features.projection[head]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * features.gain.view(-1, 16)[head] + features.bias.view(-1, 16)[head]

    return products(mapped(layer.q_features, a, head), mapped(layer.k_features, b, head // 2)) ** 2


def _lightning(layer: LinearAttention, a: Tensor, b: Tensor, head: int) -> Tensor:
    slope = 2.0 ** (-8 * (head // 2 + 1) / G) * (1 - 1 / 3 + 1e-5)
    return products(silu(a), silu(b)) * D**-0.5 * (-slope * steps()).exp()


def _gla(layer: LinearAttention, a: Tensor, b: Tensor, head: int) -> Tensor:
    since = torch.nn.functional.logsigmoid(inputs()[3]).cumsum(0)[:, :, head // 2] / 16
    return products(a * since.exp(), b * (-since).exp()) * D**-0.5


WEIGHTS = {
    "basic": lambda layer, a, b, head: products(elu(a) + 1, elu(b) + 1),
    "based": _based,
    "rebased": _rebased,
    "lightning": _lightning,
    "retention": lambda layer, a, b, head: products(a, b) * D**-0.5 * (1 - 2.0 ** (-5 - head // 2)) ** steps(),
    "gla": _gla,
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_outputs_equal_the_formula(name: str) -> None:
    layer, (q, k, v, gate) = module(name), inputs()
    divided = name in ("basic", "based", "rebased")
    want = weighted(partial(WEIGHTS[name], layer), q, k, v, divided)
    if name == "retention":
        want = want - want.mean(-1, keepdim=True)
    if not divided:
        want = want / (want.square().mean(-1, keepdim=True) + EPSILON).sqrt() * layer.gain.view(H, D)
    got = apply(layer, q, k, v, gate if name == "gla" else None)
    torch.testing.assert_close(got, want, rtol=1e-10 if name == "basic" else 1e-9, atol=0 if name == "basic" else 1e-12)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="linear attention 'mamba': choose one of basic, lightning,"):
        get("mamba")


@pytest.mark.parametrize("name", variants())
def test_all_parameters_and_inputs_have_gradients(name: str) -> None:
    layer, (q, k, v, gate) = module(name), (x.requires_grad_() for x in inputs())
    out = apply(layer, q, k, v, gate if layer.variant.gated else None)
    assert out.shape == (S, B, H, D) and layer.q_features(q).size(3) == layer.variant.features.size(D)
    out.square().sum().backward()
    leaves = [q, k, v, *([gate] if layer.variant.gated else []), *layer.parameters()]
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in leaves)
    with no_sums_in_half(torch.bfloat16, added=False):
        assert apply(layer.bfloat16(), *(x.bfloat16() for x in leaves[: 3 + layer.variant.gated])).dtype.itemsize == 2


@pytest.mark.parametrize("name", variants())
def test_tensor_parallel_heads_equal_the_whole(name: str) -> None:
    """Tensor parallelism: initial weights and decays depend on a head's number in the model, and on nothing else."""
    q, k, v, gate = inputs()
    whole = LinearAttention(get(name), Heads(heads=H, kv_heads=G, head_dim=D, v_head_dim=D, layer=1, layers=4)).double()
    want = apply(whole, q, k, v, gate if whole.variant.gated else None)
    for first in range(G):
        sizes = {"heads": H // G, "kv_heads": 1, "head_dim": D, "v_head_dim": D, "layer": 1, "layers": 4}
        part = LinearAttention(get(name), Heads(first_kv_head=first, all_kv_heads=G, **sizes)).double()
        own = slice(first, first + 1)
        queries = slice(first * H // G, (first + 1) * H // G)
        own_gate = gate[:, :, own] if part.variant.gated else None
        torch.testing.assert_close(
            apply(part, q[:, :, queries], k[:, :, own], v[:, :, own], own_gate), want[:, :, queries]
        )


def test_a_sum_of_weights_near_zero_is_guarded() -> None:
    """Features that vanish give outputs of zero, not of NaN or infinity."""
    layer, (q, k, v, _) = module("basic"), inputs()
    out = apply(layer, torch.full_like(q, -800.0), k, v)
    assert out.isfinite().all() and out.abs().max() == 0
    rebased = module("rebased")
    rebased.q_features.gain.data.zero_(), rebased.q_features.bias.data.zero_()
    assert apply(rebased, q, k, v).abs().max() == 0


FLA = {
    (None, False): "chunk_simple_gla",
    (1, False): "chunk_simple_gla",
    (D, False): "chunk_gla",
    (None, True): "chunk_delta_rule",
    (1, True): "chunk_gated_delta_rule",
    (D, True): "chunk_kda",
}
"""(decay, delta rule) -> function of fla."""


@pytest.mark.parametrize("version", versions("fla"))
@pytest.mark.parametrize("values", [D, D + 1])
@pytest.mark.parametrize(("decay", "delta"), FLA)
def test_the_adapter_to_flash_linear_attention(
    decay: int | None, delta: bool, values: int, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layout, head repetition, even rows, decays, beta and states, with the recurrence in the place of the Triton
    kernels (no GPU here)."""
    called = set()

    def stand_in(name: str, tensors: dict[str, Any], wanted: bool) -> tuple[Tensor, Tensor | None]:
        called.add(name)
        return fake_fla.reference(name, tensors, wanted)

    fake_fla.install(monkeypatch, stand_in, version)
    q, k, v, gate = (y.double() for y in inputs())
    beta = gate[..., 0].sigmoid() if delta else None
    if delta:
        k = torch.nn.functional.normalize(k, dim=3)
    v = torch.cat((v, torch.ones_like(v[..., : values - D])), 3)
    x = Tokens(q, k, v, None if decay is None else -gate.abs()[..., :decay], beta)
    torch.testing.assert_close(fla.forward(x), recurrence.forward(x))
    state = torch.randn(*k.shape[1:], values, dtype=torch.float64)
    dout, dfinal = torch.randn(*q.shape[:3], values, dtype=torch.float64), torch.randn_like(state)
    grads, want = (run_gradients(run, detached(x), dout, state, dfinal) for run in (fla.run, recurrence.run))
    for a, b in zip((*fla.run(x, state), *grads), (*recurrence.run(x, state), *want), strict=True):
        torch.testing.assert_close(a, b)
    assert called == {FLA[decay, delta]}


def test_an_odd_row_of_the_adapter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fla.install(monkeypatch, fake_fla.reference)
    monkeypatch.setattr(fla, "_even", lambda y: y)
    q, k, v, _ = inputs()
    with pytest.raises(AssertionError, match=f"chunk_simple_gla: rows of {D} and {D + 1} numbers"):
        fla.forward(Tokens(q, k, torch.cat((v, v[..., :1]), 3)))


def test_the_mildest_and_the_strongest_decays_of_many_heads() -> None:
    layer = module("retention", heads=64, kv_heads=64)
    decays = layer.prepare(torch.zeros(1, 1, 64, D), torch.zeros(1, 1, 64, D), torch.zeros(1, 1, 64, D)).log_decay
    assert decays[0].item() == pytest.approx(log(1 - 1 / 32)) and -1e-19 < decays[-1].item() < 0
