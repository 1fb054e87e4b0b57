"""Mamba, and the all-to-all that it shares with gated delta net, where no provider of ours runs that.

It brings the whole sequence, for some of the heads, to every rank, as the concatenation of the ranks' shards. Megatron
reorders these to token order and back assuming zigzag; here, by the layout. It slices each document of a pack, the
layout the pack as a whole, so documents may have any length. ``seq_idx`` tells Mamba, and ``cu_seqlens`` gated delta
net, where states restart.
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core.layout import KEPT_BYTES, Layout
from cp_plugin.megatron import runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.mixers.mixer import Mixer
from cp_plugin.megatron.patches.patching import Call, Run, replaces

REORDER = "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing"


def exchanges_heads(run: Run) -> bool:
    """Return True for models with Mamba, or gated delta net by Megatron's own all-to-all."""
    return run.settings.active and bool(run.pattern)


@replaces(
    REORDER,
    "layout of Mamba and gated delta net",
    "input_ cp_size packed_seq_params",
    otherwise="states would see the tokens in another order",
    when=exchanges_heads,
)
def replace_undo(call: Call) -> Tensor:
    """Replaces ``_undo_attention_load_balancing``: from concatenated shards to token order.

    Mamba calls it before it reads ``seq_idx``, which Megatron omits for packs of unknown length.
    """
    x, packed = call["input_"], call["packed_seq_params"]
    batch = batch_of(x.size(0), call["cp_size"], packed)
    if batch.documents is not None:
        packed.seq_idx = batch.documents.numbers.to(x.device)
    return x.index_select(0, orders(batch, x.device)[0])


@replaces(
    "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
    "layout of Mamba and gated delta net, on the way back",
    "input_ cp_size packed_seq_params",
    otherwise="layers after it would see the tokens in another order",
    when=exchanges_heads,
)
def replace_redo(call: Call) -> Tensor:
    """Replaces ``_redo_attention_load_balancing``: from token order to concatenated shards."""
    x = call["input_"]
    return x.index_select(0, orders(batch_of(x.size(0), call["cp_size"], call["packed_seq_params"]), x.device)[1])


def batch_of(tokens: int, size: int, packed: PackedSeqParams | Tensor | None) -> MicroBatch:
    """The micro-batch of a layer on so many context-parallel ranks; other args as of ``MicroBatch.find``."""
    cp = runtime.batch_layout(runtime.context_parallel())
    assert cp.size == size, f"states of {size} context-parallel ranks in a model of {cp.size}"
    return MicroBatch.find(cp, packed, tokens)


def orders(batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token -> row of the concatenated shards, and row -> token."""
    key = batch.cp.layout, batch.cp.numbers, batch.tokens, device
    return _kept.get(key, lambda: _orders_in(*key))


def _orders_in(layout: Layout, numbers: tuple[int, ...], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    held = torch.cat([layout.positions(tokens, len(numbers), number) for number in numbers])
    return held.argsort().to(device), held.to(device)


_kept: Recent[tuple[Layout, tuple[int, ...], int, torch.device], tuple[Tensor, Tensor]] = Recent(
    KEPT_BYTES, lambda orders: sum(x.nbytes for x in orders)
)


MIXER = Mixer(
    name="Mamba",
    letter="M",
    layer="megatron.core.ssm.mamba_mixer:MambaMixer",
    kernels="HAVE_MAMBA_SSM",
    patches=(replace_undo, replace_redo),
)
