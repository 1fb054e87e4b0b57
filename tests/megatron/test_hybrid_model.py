"""Megatron's HybridModel under context parallelism: a planted fault, and the specs of its layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from state_space_kernels import STATES
from training import check

pytestmark = pytest.mark.usefixtures("adapter")
MAMBA = f"--hybrid-layer-pattern M* {STATES} --calculate-per-token-loss"


def _stock_order() -> None:
    from megatron.core.ssm import mamba_context_parallel as used

    from cp_plugin.megatron.patches import patching

    for name in ("_undo_attention_load_balancing", "_redo_attention_load_balancing"):
        setattr(used, name, patching.original(f"{used.__name__}:{name}"))


@pytest.mark.parametrize(
    ("provider", "error", "message"),
    [
        ("striped", Exception, "differs from the step on one rank"),
        ("striped --cp-selfcheck off", AssertionError, "gradient of"),
    ],
)
def test_megatrons_own_order_is_found_wrong_in_other_layouts(
    provider: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(MAMBA, f"--cp-provider {provider}", cp=2, prepare=_stock_order)


def test_a_layer_that_lies_elsewhere_than_its_mixer_keeps_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """As since Megatron-LM #7239; a layer around something else does not."""
    from cp_plugin.megatron.patches import hybrid

    monkeypatch.setattr(hybrid, "installed", lambda: [hybrid.REORDER])
    for module, keeps in (("megatron.core.ops.ssm.mamba2.mixer", True), ("of_a_user", False)):
        layer = torch.nn.Module()
        layer.mixer = type("Mixer", (torch.nn.Module,), {"__module__": module})()
        assert hybrid.keeps_layout(layer) is keeps


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
    from cp_plugin.megatron.layers import spec
    from cp_plugin.megatron.patches import hooks

    def attention(stack: Any, kind: str) -> Any:
        return getattr(stack.submodules, kind).submodules.self_attention.submodules.core_attention

    monkeypatch.setattr(mode, "active", lambda: False)
    given: list[Any] = []
    init = hooks.replace_hybrid_model(lambda self, config, hybrid_stack_spec: given.append(hybrid_stack_spec))
    for settings in (Settings(), Settings(provider="ring")):
        runtime.configure(settings)
        init(None, None, hybrid_stack_spec)
    assert given[0] is hybrid_stack_spec
    kinds = [kind for kind in ("attention_layer", "mla_layer") if hasattr(hybrid_stack_spec.submodules, kind)]
    assert [attention(given[1], kind) for kind in kinds] == [spec.ByLayerNumber] * len(kinds)
    assert [attention(hybrid_stack_spec, kind) for kind in kinds] == [TEDotProductAttention] * len(kinds)
    assert [repr(TEDotProductAttention) in repr(stack) for stack in given] == [True, False]
