"""The core attention of linear layers: specs, gate, weights, audit, self-check."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from nightly import one_case
from rule_examples import run_of
from test_attention_module import make_config, make_layer
from test_startup import _rows
from training import FIRST_LOSS, train
from warm import megatrons_own_data

from cp_plugin.engine.linear import recurrence
from cp_plugin.engine.linear.tokens import tokens_of
from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")
SAME_VOCABULARY = "--make-vocab-size-divisible-by 64"  # Megatron pads it for the tensor-parallel ranks
HYBRID = "--context-parallel-size 2 --cp-linear-attention gla --cp-layer-pattern LN"


def start(variant: str = "gla", pattern: str = "L") -> None:
    """Linear attention switched on, in a process with one context-parallel rank."""
    from cp_plugin.megatron.patches import hooks

    hooks.start(run_of(f"--cp-linear-attention {variant} --cp-layer-pattern {pattern}", linear=True).settings)


@pytest.fixture
def gla(adapter: None) -> None:
    start()


def test_the_specs_choose_by_the_layers_number(adapter: None) -> None:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.spec_utils import build_module

    from cp_plugin.megatron.mixers.core_attention import CoreAttention
    from cp_plugin.megatron.mixers.linear_attention import LinearCoreAttention

    start("lightning", "LLN")
    for provider in (LocalSpecProvider(), TESpecProvider()):
        kind = provider.core_attention()
        made = [make_layer(layer_number=n, kind=kind) for n in range(1, 7)]
        assert [type(module) for module in made] == 2 * [LinearCoreAttention, LinearCoreAttention, CoreAttention]
        named = {"layer_number": 3, "attn_mask_type": made[0].attn_mask_type, "attention_type": "self"}
        assert type(build_module(kind, config=make_config(), **named)) is CoreAttention


@pytest.mark.parametrize("variant", variants())
def test_it_computes_what_its_layer_does_in_float64(variant: str) -> None:
    """Token by token, where the module's own kernel may be the chunked one; gradients, too."""
    start(variant)
    for dtype, allowed in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        module = make_layer(make_config(params_dtype=dtype), layer_number=2)
        assert all(weight.dtype == dtype for weight in module.parameters())
        if dtype != torch.float32 and module.linear.variant.features.learned_norm:
            continue  # which squares the error of sums that may be small
        gated, draw = module.gate is not None, torch.Generator().manual_seed(20)
        shapes = [(96, 2, *x) for x in ((4, 16), (2, 16), (2, 16 * (1 + gated)), (4, 16))]
        *qkv, dout = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
        qkv = [x + shift for x, shift in zip(qkv, (1, 1, 0), strict=True)]
        dout[0] = 0  # the first token's sum has a single term, which may be arbitrarily small
        leaves, layer = [x.requires_grad_() for x in qkv], copy.deepcopy(module.linear).double()
        out = module(*leaves, None)
        got = out, *torch.autograd.grad(out, leaves, dout.flatten(2))
        wide = [x.detach().double().requires_grad_() for x in qkv]
        v, gate = wide[2].chunk(2, 3) if gated else (wide[2], None)
        x = layer.prepare(wide[0], wide[1], v, gate)
        exact = layer.finish(x.scale * recurrence.forward(tokens_of(x.q, x.k, x.v, x.log_decay)))
        want = exact.flatten(2), *torch.autograd.grad(exact, wide, dout.double())
        for a, b in zip(got, want, strict=True):
            assert (a.double() - b).norm() <= allowed * b.norm()


def test_all_weights_are_marked_as_divided_but_the_gates_first_factor(gla: None) -> None:
    weights = dict(make_layer().named_parameters())
    assert {name: w.shape for name, w in weights.items()} == {
        "linear.gain": (64,),
        "gate.down": (16, 64),
        "gate.up": (2, 16, 16),
        "gate.bias": (2, 16),
    }
    divided = {name for name, w in weights.items() if getattr(w, "tensor_model_parallel", False)}
    assert divided == weights.keys() - {"gate.down"}
    assert all(weights[name].partition_dim == 0 for name in divided)


def test_layers_and_heads_begin_with_weights_of_their_own(gla: None) -> None:
    first, second = (make_layer(layer_number=n).gate for n in (1, 2))
    assert not torch.equal(first.down, second.down) and not torch.equal(first.up, second.up)
    assert not torch.equal(first.up[0], first.up[1])
    assert torch.equal(first.up, make_layer(layer_number=1).gate.up)


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_the_gate_sees_what_a_projection_with_a_norm_inside_sees(gla: None, norm: str, zero_centered: bool) -> None:
    """Transformer Engine's projection takes the hidden state before the norm."""
    from cp_plugin.megatron.mixers.linear_attention import _normalised

    x, weight, bias = torch.randn(3, 1, 64), torch.rand(64), torch.rand(64)
    inside = SimpleNamespace(
        layer_norm_weight=weight - float(zero_centered),
        layer_norm_bias=bias,
        zero_centered_gamma=zero_centered,
        normalization=norm,
        eps=1e-5,
    )
    centred = x - x.mean(-1, keepdim=True) if norm == "LayerNorm" else x
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    want = want + bias if norm == "LayerNorm" else want
    torch.testing.assert_close(_normalised(x, inside), want)
    assert _normalised(x, SimpleNamespace()) is x


def test_calls_and_layers_it_does_not_support(gla: None) -> None:
    from megatron.core.transformer.enums import AttnMaskType

    module = make_layer()
    q, k = torch.randn(8, 2, 4, 16), torch.randn(8, 2, 2, 16)
    with pytest.raises(
        ValueError, match=r"^layer 1: --cp-linear-attention gla got no gate, which is computed in get_query_"
    ):
        module(q, k, k, None)
    with pytest.raises(ValueError, match=r"^layer 1: linear attention is causal, but got the mask type no_mask"):
        module(q, k, k, None, attn_mask_type=AttnMaskType.no_mask)
    with pytest.raises(ValueError, match=r"^--cp-linear-attention gla does not support a sliding window"):
        make_layer(make_config(window_size=(8, 0)))


def test_audit_names_both_kinds(capfd: pytest.CaptureFixture[str]) -> None:
    train(2, f"{HYBRID} --num-layers 4 --cp-verbose")
    text = capfd.readouterr().out
    rows = _rows(text)
    assert rows["provider"].startswith("all_gather: ")
    assert rows["linear attention"] == "gla: gated linear attention (arXiv 2312.06635)"
    assert rows["linear provider"].startswith("lasp2: LASP-2")
    assert rows["layer pattern"] == "LN x 2"
    assert rows["attention layers"] == "4 of 4 replaced: 2 linear, 2 softmax"
    assert rows["layout"].startswith("zigzag; each of 2 ranks")
    assert "chunked: linear attention, plain torch, because fla does not run: its Triton kernels need a CUDA" in text
    assert "sdpa: " in text
    assert text.count("cp_plugin: self-check passed: a step") == 1
    assert "num_floating_point_operations" in text


def test_providers_with_different_token_orders_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(providers.get("attention2d"), beside=("q",))
    monkeypatch.setitem(providers.registry(), "attention2d", other)
    flags = HYBRID.replace("size 2", "size 4") + " --cp-provider attention2d --cp-grid 2x2"
    with pytest.raises(RankError, match="attention2d assigns zigzag tokens to ranks in a different order"):
        train(4, flags)


@one_case
@pytest.mark.parametrize("variant", ["gla", "lightning", "rebased"])
def test_tensor_parallelism_divides_the_heads_and_their_weights(variant: str) -> None:
    """One and two tensor-parallel ranks: decays, gates and features depend on the heads' global indices."""
    model = f"--cp-linear-attention {variant} --cp-layer-pattern LN --use-cpu-initialization {SAME_VOCABULARY}"
    (whole,) = train(1, model, prepare=megatrons_own_data)
    for more in ("", "--sequence-parallel"):
        halves = train(2, f"{model} --tensor-model-parallel-size 2 {more}", prepare=megatrons_own_data)
        assert abs(halves[0].losses[0] / whole.losses[0] - 1) <= FIRST_LOSS
        names = [name for name in whole.weights if "core_attention" in name]
        assert any("linear" in name for name in names)
        for name in names:
            for part in ("weights", "grads"):
                want = getattr(whole, part)[name]
                first, second = (getattr(record, part)[name] for record in halves)
                shared = first.shape == want.shape
                got = first if shared else torch.cat((first, second))
                assert (got - want).norm() <= 1e-5 * want.norm(), (part, name, more)
                assert not shared or torch.equal(first, second), (part, name, more)


TOKENS, SQUARES = 4 * 64, 4 * 64**2  # of a global batch
QUADRATIC = 3 * 2 * 4 * 16 * SQUARES  # forward and backward of a causal layer, 4 heads of 16


@pytest.mark.parametrize(
    ("flags", "linear_layers", "per_token"),
    [
        ("lightning", 2, 2 * (4 + 2) * 16 * 16),
        ("lightning --cp-layer-pattern LN", 1, 2 * (4 + 2) * 16 * 16),
        ("basic", 2, 2 * (4 + 2) * 16 * 17),
        ("gla", 2, 2 * ((4 + 2) * 16 * 16 + 64 * 16 + 16 * 2 * 16)),
        ("rebased", 2, 2 * ((4 + 2) * 136 * 17 + (4 + 2) * 16 * 16)),
    ],
)
def test_the_count_of_operations(
    validated: Callable[..., argparse.Namespace], flags: str, linear_layers: int, per_token: int
) -> None:
    """Of Megatron as the plugin changes it, against a count by hand."""
    from megatron.training import training

    args = validated(f"--context-parallel-size 4 --cp-linear-attention {flags}")
    args.padded_vocab_size = 128
    projections = 64 * (64 + 2 * 32) + 64 * 64  # q, k and v; out
    feed_forward = 3 * 64 * 128
    rest = 6 * TOKENS * (2 * (projections + feed_forward) + 64 * 128)
    want = rest + (2 - linear_layers) * QUADRATIC + linear_layers * 3 * TOKENS * per_token
    assert training.num_floating_point_operations(args, 4) == want
