"""Layer specs that hold their core attention already, which no replaced function can change any more."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from cp_plugin.megatron.layers.core_attention import CoreAttention


def in_spec(model: Any) -> None:
    """Put the plugin's attention into ``model.transformer_layer_spec`` if that is a spec and not a function of one.

    Only in the place of Megatron's own core attention: any other class stays, and the audit refuses it.
    """
    _walk(model.transformer_layer_spec)


def _walk(spec: Any) -> None:
    for one in getattr(spec, "layer_specs", None) or ():
        _walk(one)
    submodules = getattr(spec, "submodules", None)
    if submodules is None:
        return
    if getattr(submodules, "core_attention", None) in _stock():
        submodules.core_attention = CoreAttention
    for part in vars(submodules).values():
        if isinstance(part, ModuleSpec):
            _walk(part)


def _stock() -> list[Any]:
    from megatron.core.extensions import transformer_engine

    return [DotProductAttention, *([transformer_engine.TEDotProductAttention] if transformer_engine.HAVE_TE else [])]
