"""Probes of Megatron's attention: that it computes, or hands to Transformer Engine, what the plugin's computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from cp_plugin.megatron.patches import patching, stock
from cp_plugin.megatron.patches.probing import TOKENS, config, difference, numbers


def core_attention(original: Callable[..., type], replacement: Callable[..., type]) -> str | None:
    """``LocalSpecProvider.core_attention``: the attention that it names computes what the plugin's does on one rank."""
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import GlobalMemoryBuffer

    from cp_plugin.megatron.layers.core_attention import CoreAttention

    groups = SimpleNamespace(tp=stock.Group(), cp=stock.Group())
    q, k, v = (numbers(TOKENS, 1, heads, 8).to(stock.device()) for heads in (4, 2, 2))
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=stock.device()).triu(1)[None, None]
    cases: tuple[tuple[dict[str, Any], float | None], ...] = (
        ({}, None),
        ({}, 0.1),
        ({"window_size": (5, 0)}, None),
        ({"softmax_type": "off-by-one"}, None),
        ({"softmax_type": "learnable"}, None),
    )
    for settings, scale in cases:
        asked = config(**settings)
        asked.sequence_parallel = True  # otherwise dropout, of nothing here, asks for generators that nobody has made
        given = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
        given |= {"softmax_scale": scale, "pg_collection": groups}
        memory = patching.lent(parallel_state, _GLOBAL_MEMORY_BUFFER=GlobalMemoryBuffer())  # of scores
        with stock.alone(), torch.no_grad(), memory:
            outs = []
            for kind, mask in ((original(LocalSpecProvider()), hidden), (CoreAttention, None)):
                module = kind(asked, **given).to(stock.device())
                for sinks in module.parameters():
                    sinks.copy_(numbers(4))
                outs.append(module(*(x.clone() for x in (q, k, v)), attention_mask=mask))
        what = ", ".join(f"{name} {value}" for name, value in settings.items()) or "causal attention"
        if found := difference(
            f"{what}{'' if scale is None else f', softmax_scale {scale}'}: the output", *outs, limit=1e-4
        ):
            return found
    return None


class _Handed(Exception):
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments


def te_attention(original: Callable[..., type], replacement: Callable[..., type]) -> str | None:
    """``TESpecProvider.core_attention``: what its class hands to Transformer Engine is what the plugin's computes."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.transformer.enums import AttnMaskType

    kind = original(TESpecProvider())
    if not (isinstance(kind, type) and vars(extension).get("HAVE_TE")):
        return None  # no such class without Transformer Engine

    def hand(self: Any, *_: Any, **named: Any) -> None:
        raise _Handed(named)

    given = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self", "softmax_scale": 0.3}
    groups = SimpleNamespace(tp=stock.Group(), cp=stock.Group(), hcp=None)
    try:
        with patching.lent(extension.te.pytorch.DotProductAttention, __init__=hand):
            kind(config(window_size=(5, 0), softmax_type="learnable"), **given, pg_collection=groups)
    except _Handed as handed:
        want = {"num_attention_heads": 4, "kv_channels": 8, "num_gqa_groups": 2, "softmax_scale": 0.3}
        want |= {"attention_dropout": 0.0, "window_size": (5, 0), "softmax_type": "learnable"}
        got = handed.arguments
        wrong = [f"{name} {got.get(name)!r}, not {x!r}" for name, x in want.items() if got.get(name) != x]
        return f"Transformer Engine's attention gets {', '.join(wrong)}" if wrong else None
    return "it does not build Transformer Engine's attention"
