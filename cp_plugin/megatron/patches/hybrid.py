"""Megatron's HybridModel (``--hybrid-layer-pattern``): what the layer behind each symbol of the pattern needs.

*     attention: the spec names Transformer Engine's class, and the layer builds the plugin's in its place
- E   each token on its own, dense or by experts: nothing
M G   Mamba, gated delta net: an all-to-all brings the whole sequence to every rank, for some of the heads, as the
      ranks' shards one after another. Megatron puts these in token order as if they were zigzag's, and back: here,
      as the layout's
D +   refused (``rules.models``)
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from cp_plugin.core.layout import Layout
from cp_plugin.megatron import runtime
from cp_plugin.megatron.layers import spec
from cp_plugin.megatron.patches.patching import Call, around, installed
from cp_plugin.megatron.rules.models import STATES_PACKED

REORDER = "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing"
_STATES = "megatron.core.ssm"


@around
def replace_attention_init(call: Call) -> None:
    """The replacement for ``Attention.__init__``: the plugin's core attention where the spec names that of TE."""
    submodules = call["submodules"]
    if submodules.core_attention is TEDotProductAttention:
        submodules = replace(submodules, core_attention=spec.ByLayerNumber)
    call.original(submodules=submodules)


@around
def replace_undo(call: Call) -> Tensor:
    """The replacement for ``_undo_attention_load_balancing``: from the ranks' shards in a row to token order."""
    return _reordered(call, from_tokens=False)


@around
def replace_redo(call: Call) -> Tensor:
    """The replacement for ``_redo_attention_load_balancing``: from token order to the ranks' shards in a row."""
    return _reordered(call, from_tokens=True)


def keeps_layout(module: torch.nn.Module) -> bool:
    """Whether a layer that is no attention mixes tokens in the plugin's layout."""
    inner = module.self_attention if isinstance(module, TransformerLayer) else module
    return REORDER in installed() and type(inner).__module__.startswith(_STATES)


def order_problems(tokens: int, mine: Tensor, group: dist.ProcessGroup) -> list[str]:
    """What is wrong with the order in which states are computed, for the self-check. mine: this rank's positions."""
    from megatron.core.ssm import mamba_context_parallel as used

    held = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(held, mine, group=group)
    stored = torch.cat(held)
    there = used._undo_attention_load_balancing(stored, group.size())
    back = used._redo_attention_load_balancing(there, group.size())
    right = torch.equal(there, torch.arange(tokens, device=mine.device)) and torch.equal(back, stored)
    return [] if right else ["the order of tokens in Mamba and gated delta net layers differs"]


def _reordered(call: Call, *, from_tokens: bool) -> Tensor:
    if call["packed_seq_params"] is not None:
        states = "Mamba and gated delta net layers"
        raise ValueError(STATES_PACKED.message(packed="packed (THD) sequences", states=states))
    cp, x, size = runtime.context_parallel(), call["input_"], call["cp_size"]
    assert cp.size == size, f"states of {size} context-parallel ranks in a model of {cp.size}"
    held, row_of_token = _of_layout(cp.layout, cp.numbers, x.size(0), x.device)
    return x.index_select(0, held if from_tokens else row_of_token)


@lru_cache(maxsize=64)
def _of_layout(layout: Layout, numbers: tuple[int, ...], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which token each row of the ranks' shards is, and the row of each token."""
    held = torch.cat([layout.positions(tokens, len(numbers), number) for number in numbers])
    return held.to(device), held.argsort().to(device)
