"""Specs: the class of core attention that Megatron builds in its layers, instead of its own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from cp_plugin.megatron import runtime
from cp_plugin.megatron.mixers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.mixers.linear_attention import LinearCoreAttention
from cp_plugin.megatron.patches.patching import Call, registers


class ByLayerNumber:
    """Makes a ``LinearCoreAttention`` or a ``CoreAttention``; a class, since Megatron builds modules from classes."""

    def __new__(cls, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any) -> AnyCoreAttention:
        linear = runtime.settings().linear
        kind = LinearCoreAttention if linear is not None and linear.has(layer_number) else CoreAttention
        return kind(config, layer_number, *args, **kwargs)


def with_core_attention(spec: Any) -> Any:
    """A deep copy of a spec with the plugin's core attention instead of Megatron's."""
    if spec is TEDotProductAttention or spec is DotProductAttention:
        return ByLayerNumber
    if isinstance(spec, list):
        return [with_core_attention(one) for one in spec]
    if isinstance(spec, type) or not is_dataclass(spec):
        return spec
    return replace(spec, **{field.name: with_core_attention(getattr(spec, field.name)) for field in fields(spec)})


@registers(
    "megatron.core.models.backends:LocalSpecProvider.core_attention",
    "attention of the local spec",
    otherwise="attention would not match a single rank's",
)
def replace_core_attention(call: Call) -> type:
    """Replaces ``BackendSpecProvider.core_attention``: the class that a spec uses for all layers."""
    return CoreAttention if runtime.settings().linear is None else ByLayerNumber


IN_TRANSFORMER_ENGINE = replace(
    replace_core_attention,
    target="megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention",
    reason="attention of the Transformer Engine spec",
)
