"""Which core attention a layer gets.

Local and Transformer Engine specs ask their ``BackendSpecProvider`` for one class for all layers. Where these differ,
the patched providers answer with ``ByLayerNumber``, which makes the one that a layer is to have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers.core_attention import AnyCoreAttention, CoreAttention
from cp_plugin.megatron.layers.linear_attention import LinearCoreAttention


class ByLayerNumber:
    """Makes a ``LinearCoreAttention`` or a ``CoreAttention``. A class, since Megatron builds modules from classes."""

    def __new__(cls, config: TransformerConfig, layer_number: int, *args: Any, **kwargs: Any) -> AnyCoreAttention:
        linear = runtime.settings().linear
        kind = LinearCoreAttention if linear is not None and linear.has(layer_number) else CoreAttention
        return kind(config, layer_number, *args, **kwargs)


def replace_core_attention(original: Callable[..., type]) -> Callable[..., type]:
    """The replacement for ``BackendSpecProvider.core_attention``."""

    def core_attention(self: Any) -> type:
        linear = runtime.settings().linear
        if linear is None:
            return CoreAttention
        return ByLayerNumber if linear.hybrid else LinearCoreAttention

    return core_attention
