"""Megatron's HybridModel (``--hybrid-layer-pattern``): what the layer behind each symbol of the pattern needs.

* +   attention, also multi-latent: where the spec names Megatron's own class, the model is given the plugin's
- E   each token on its own, dense or by experts: nothing
M G   Mamba, gated delta net: an all-to-all brings the whole sequence to every rank, for some of the heads, as the
      ranks' shards one after another. Megatron puts these in token order as if they were zigzag's, and back: here,
      as the layout's. It divides each document of a pack like that, the layout the pack as a whole: so documents may
      have any length. Where states begin anew is told to Mamba by ``seq_idx``, to gated delta net by ``cu_seqlens``
D     refused (``rules.models``)

All of them compute in one layout, unless ``--linear-cp-layout contiguous`` has Megatron's layout manager convert zigzag
tokens around attention: everything else is contiguous then, ``runtime.between_layers``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from cp_plugin.core.layout import KEPT_BYTES, Layout
from cp_plugin.core.recent import Recent
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.patches import packing
from cp_plugin.megatron.patches.patching import Call, around, installed

REORDER = "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing"


@around
def replace_undo(call: Call) -> Tensor:
    """The replacement for ``_undo_attention_load_balancing``: from the ranks' shards in a row to token order.

    Mamba asks for it before it reads ``seq_idx``, which Megatron leaves out where nobody has said how long the pack is.
    """
    x, packed = call["input_"], call["packed_seq_params"]
    if packed is not None:
        packed.seq_idx = packing.numbers(packed, x.size(0), x.device)
    return x.index_select(0, _orders(x.size(0), x.device, call["cp_size"], packing.places(packed)).there)


@around
def replace_redo(call: Call) -> Tensor:
    """The replacement for ``_redo_attention_load_balancing``: from token order to the ranks' shards in a row."""
    x, where = call["input_"], packing.places(call["packed_seq_params"])
    return x.index_select(0, _orders(x.size(0), x.device, call["cp_size"], where).back)


@around
def replace_packed_order(call: Call) -> tuple[Tensor, Tensor]:
    """The replacement for ``_build_thd_cp_a2a_perm``: both orders of a pack, for gated delta net."""
    where = call["cu_seqlens"]
    return _orders(call["t_global"], where.device, call["cp_size"], where)


@around
def replace_resolve_cu_seqlens(call: Call) -> Tensor:
    """The replacement for ``_resolve_cu_seqlens``: documents of any length, and padding after the last one."""
    padded = call["cu_seqlens_padded"]
    return packing.starts(call["cu_seqlens_actual"] if padded is None else padded, call["total_seq_len"])


def keeps_layout(module: torch.nn.Module) -> bool:
    """Whether a layer that is no attention mixes tokens in the plugin's layout."""
    inner = module.self_attention if isinstance(module, TransformerLayer) else module
    return REORDER in installed() and type(inner).__module__.startswith(compat.STATE_SPACES)


def order_problems(tokens: int, packs: Sequence[PackedSeqParams], device: torch.device) -> list[str]:
    """What is wrong with the order in which states are computed, for the self-check: of a sequence, and of packs."""
    used, _ = compat.find(REORDER)
    cp, group = runtime.between_layers(runtime.context_parallel()), parallel_state.get_context_parallel_group()
    right = True
    for pack in (None, *packs):
        mine = packing.on_pack(cp, packing.places(pack), tokens).positions(tokens, device)
        held = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(held, mine, group=group)
        stored = torch.cat(held)
        there = used._undo_attention_load_balancing(stored, group.size(), pack)
        back = used._redo_attention_load_balancing(there, group.size(), pack)
        right &= torch.equal(there, torch.arange(tokens, device=mine.device)) and torch.equal(back, stored)
    return [] if right else ["the order of tokens in Mamba and gated delta net layers differs"]


def converts(module: torch.nn.Module) -> bool:
    """Whether Megatron's layout manager converts tokens between the layers of this stack; there is one since 0.20."""
    manager = getattr(module, "_cp_layout_manager", None)
    return manager is not None and manager.requires_conversion


def conversion_problems(module: torch.nn.Module, outside: Tensor, inside: Tensor) -> list[str]:
    """What is wrong with how a stack converts, for the self-check.

    outside, inside: this rank's positions between the layers, and in attention.
    """
    manager: Any = module._cp_layout_manager
    to, back = ("contiguous", "zigzag"), ("zigzag", "contiguous")
    whole = replace(manager, sequence_parallel=False)
    pairs = ((outside, inside, to), (inside, outside, back))
    right = all(torch.equal(whole._convert_cp_layout(a, *names), b) for a, b, names in pairs)
    return [] if right else ["the order of tokens in which Megatron's layout manager hands them to attention differs"]


class _Orders(NamedTuple):
    there: Tensor
    """The row, of the ranks' shards one after another, of each token."""
    back: Tensor
    """The token of each row."""


def _orders(tokens: int, device: torch.device, size: int, where: Tensor | None) -> _Orders:
    """where: documents begin, in a pack."""
    cp = packing.on_pack(runtime.between_layers(runtime.context_parallel()), where, tokens)
    assert cp.size == size, f"states of {size} context-parallel ranks in a model of {cp.size}"
    asked = cp.layout, cp.numbers, tokens, device
    return _kept.get(asked, lambda: _of_layout(*asked))


def _of_layout(layout: Layout, numbers: tuple[int, ...], tokens: int, device: torch.device) -> _Orders:
    held = torch.cat([layout.positions(tokens, len(numbers), number) for number in numbers])
    return _Orders(held.argsort().to(device), held.to(device))


_kept: Recent[tuple[Layout, tuple[int, ...], int, torch.device], _Orders] = Recent(
    KEPT_BYTES, lambda orders: orders.there.nbytes + orders.back.nbytes
)
