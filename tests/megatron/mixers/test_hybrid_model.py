"""Megatron's HybridModel under context parallelism: its layers by a provider, and their specs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from feature_faults import CP, PACKS
from state_space_kernels import STATES
from training import SHORT, train

pytestmark = pytest.mark.usefixtures("adapter")


def test_delta_net_by_a_provider_is_announced_and_checked_in_half_precision(capfd: pytest.CaptureFixture[str]) -> None:
    flags = f"{CP} ring --cp-linear-provider lasp1 --hybrid-layer-pattern G* {STATES} --seq-length 32 --bf16 {PACKS}"
    train(2, flags, documents=SHORT)
    told = capfd.readouterr().out
    assert "gated delta net" in told and "by lasp1: LASP (arXiv 2404.02882)" in told
    assert "chunked: linear attention, plain torch, because fla does not run: its Triton kernels need a CUDA" in told
    assert "self-check passed" in told


def test_a_layer_that_lies_elsewhere_than_its_mixer_keeps_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As since Megatron-LM #7239; a layer around something else does not."""
    from cp_plugin.megatron.mixers import mamba, table

    monkeypatch.setattr(table, "installed", lambda: [mamba.REORDER])
    for module, keeps in (("megatron.core.ops.ssm.mamba2.mixer", True), ("of_a_user", False)):
        layer = torch.nn.Module()
        layer.mixer = type("Mixer", (torch.nn.Module,), {"__module__": module})()
        assert table.keeps_layout(layer) is keeps


def test_the_local_spec_has_the_layers_that_this_megatron_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from cp_plugin.megatron.models import hybrid

    fewer = dataclasses.make_dataclass("Fewer", ["mamba_layer", "attention_layer", "mlp_layer"])
    monkeypatch.setattr(hybrid, "HybridStackSubmodules", fewer)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert isinstance(hybrid.local_stack_spec(config).submodules, fewer)


def test_the_attention_of_megatrons_own_spec_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in its attention layers: the rest of the spec needs Transformer Engine."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.cpu import mode
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.mixers.spec import ByLayerNumber
    from cp_plugin.megatron.patches import hooks

    def attention(stack: Any, kind: str) -> Any:
        return getattr(stack.submodules, kind).submodules.self_attention.submodules.core_attention

    monkeypatch.setattr(mode, "active", lambda: False)
    stacks: list[Any] = []
    init = hooks.replace_hybrid_model(lambda self, config, hybrid_stack_spec: stacks.append(hybrid_stack_spec))
    for settings in (Settings(), Settings(provider="ring")):
        runtime.configure(settings)
        init(None, None, hybrid_stack_spec)
    assert stacks[0] is hybrid_stack_spec
    kinds = [kind for kind in ("attention_layer", "mla_layer") if hasattr(hybrid_stack_spec.submodules, kind)]
    assert [attention(stacks[1], kind) for kind in kinds] == [ByLayerNumber] * len(kinds)
    assert [attention(hybrid_stack_spec, kind) for kind in kinds] == [TEDotProductAttention] * len(kinds)
    assert [repr(TEDotProductAttention) in repr(stack) for stack in stacks] == [True, False]
