"""The core attention module: Megatron's contract, refusals, and the specs that build it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Case, Result, assert_close

from cp_plugin.megatron.flags.args import Settings
from cp_plugin.testing.oracle import softmax_reference

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
"""A process group of this rank."""


@pytest.fixture
def ring(adapter: None) -> None:
    """The ring provider switched on, in a process with one context-parallel rank."""
    from cp_plugin.megatron.patches import hooks

    hooks.start(Settings(provider="ring"))


def make_config(**changes: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    return TransformerConfig(**sizes, **{"attention_dropout": 0.0, "hidden_dropout": 0.0} | changes)


def make_layer(config: Any = None, kind: Any = None, **arguments: Any) -> Any:
    """The core attention of a layer, the first by default; kind: None: by the settings."""
    from megatron.core.transformer.enums import AttnMaskType

    from cp_plugin.megatron.mixers.spec import ByLayerNumber

    usual = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self", "cp_comm_type": "p2p"}
    usual["pg_collection"] = SimpleNamespace(tp=ALONE, cp=None)
    return (kind or ByLayerNumber)(config or make_config(), **usual | arguments)


def test_the_mask_of_a_call_and_the_scale_and_softmax_of_a_layer(ring: None) -> None:
    """Causal calls are for the self-check."""
    from megatron.core.transformer.enums import AttnMaskType

    case = Case(seq_length=12, heads=4, kv_heads=2, causal=False, dtype=torch.float32)
    q, k, v, dout = (x.requires_grad_() for x in case.inputs())
    module = make_layer(make_config(softmax_type="off-by-one", use_cpu_initialization=True), softmax_scale=0.3)
    out = module(q, k, v, None, attn_mask_type=AttnMaskType.no_mask, attention_bias=None, packed_seq_params=None)
    assert out.shape == (12, 2, 64)
    grads = torch.autograd.grad(out, (q, k, v), dout.flatten(2))
    want = softmax_reference(q, k, v, dout, case.hidden().__getitem__, scale=0.3, sink=torch.zeros(4))
    assert_close(Result(out.detach().view(12, 2, 4, 16), *grads), Result(*want), 1e-5, "off-by-one")


def test_layers_and_calls_are_put_to_the_rules(ring: None) -> None:
    """Which test_refusals tries; scaling of queries and keys by the layer's number changes nothing."""
    q, k, v, _ = Case(seq_length=8, heads=4, kv_heads=2, causal=True, dtype=torch.float32).inputs()
    with pytest.raises(ValueError, match=r"--cp-provider ring does not support .*cross attention"):
        make_layer(attention_type="cross")
    module, flat = make_layer(layer_number=3), (q[:, 0], k[:, 0], v[:, 0], None)
    with pytest.raises(ValueError, match=r"layer 3: --cp-provider ring does not support queries of shape \(8, 4, 16\)"):
        module(*flat)
    scaled = make_layer(make_config(apply_query_key_layer_scaling=True), layer_number=3)
    assert torch.equal(module(q, k, v, None), scaled(q, k, v, None))


def test_it_has_no_parameters_and_loads_what_transformer_engine_saved(ring: None) -> None:
    module = make_layer()
    assert not module.state_dict()
    module.load_state_dict({"_extra_state": torch.empty(0)})
    assert module.load_state_dict({"other": torch.empty(0)}, strict=False).unexpected_keys == ["other"]


def test_a_context_parallel_layer_needs_a_group(ring: None) -> None:
    with pytest.raises(ValueError, match="its pg_collection has no cp group"):
        make_layer(make_config(context_parallel_size=2))


def test_a_softmax_offset_counts_once_in_the_norm_of_gradients(adapter: None) -> None:
    """Taken for replicas, those of tensor-parallel ranks were clipped wrongly (Megatron 7452)."""
    from cp_plugin.megatron.mixers import core_attention as attention

    offset = attention._softmax_offset(make_config(softmax_type="learnable", use_cpu_initialization=True))
    assert isinstance(offset, torch.nn.Parameter) and offset.tensor_model_parallel is True
