"""Megatron's HybridModel (``--hybrid-layer-pattern``): token order in Mamba and gated delta net layers.

* +   attention, also multi-latent: the spec gets the plugin's class (``hooks``)
- E   dense and expert feed-forward: tokens are independent, nothing to do
M G   Mamba, gated delta net: an all-to-all brings the whole sequence, for some of the heads, to every rank, as the
      concatenation of the ranks' shards. Megatron reorders these to token order and back assuming zigzag; here, by the
      layout. It slices each document of a pack, the layout the pack as a whole, so documents may have any length.
      ``seq_idx`` tells Mamba, and ``cu_seqlens`` gated delta net, where states restart
D     refused (``rules.models``)

All layers compute in one layout, unless ``--linear-cp-layout contiguous`` makes Megatron's layout manager convert
zigzag tokens around attention; then everything else is contiguous (``runtime.between_layers``).
"""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from cp_plugin.common.recent import Recent
from cp_plugin.core.layout import KEPT_BYTES, Layout
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.patches import delta_net
from cp_plugin.megatron.patches.patching import Call, Run, installed, replaces

REORDER = "megatron.core.ssm.mamba_context_parallel:_undo_attention_load_balancing"
PACKED_ORDER = "megatron.core.ssm.gated_delta_net.common:_build_thd_cp_a2a_perm"


def _states(run: Run) -> bool:
    """Mamba, or gated delta net by Megatron's own all-to-all."""
    return run.settings.active and run.hybrid


def _gated_delta_net(run: Run) -> bool:
    return _states(run) and "G" in run.pattern and run.settings.delta_net is None


@replaces(
    REORDER,
    "layout of Mamba and gated delta net",
    "input_ cp_size packed_seq_params",
    called_by="Mamba and gated delta net",
    otherwise="states would see the tokens in another order",
    when=_states,
)
def replace_undo(call: Call) -> Tensor:
    """Replaces ``_undo_attention_load_balancing``: from concatenated shards to token order.

    Mamba calls it before it reads ``seq_idx``, which Megatron omits for packs of unknown length.
    """
    x, packed = call["input_"], call["packed_seq_params"]
    batch = _batch(x.size(0), call["cp_size"], packed)
    if batch.documents is not None:
        packed.seq_idx = batch.documents.numbers.to(x.device)
    return x.index_select(0, _orders(batch, x.device)[0])


@replaces(
    "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
    "layout of Mamba and gated delta net, on the way back",
    "input_ cp_size packed_seq_params",
    called_by="Mamba and gated delta net",
    otherwise="layers after it would see the tokens in another order",
    when=_states,
)
def replace_redo(call: Call) -> Tensor:
    """Replaces ``_redo_attention_load_balancing``: from token order to concatenated shards."""
    x = call["input_"]
    return x.index_select(0, _orders(_batch(x.size(0), call["cp_size"], call["packed_seq_params"]), x.device)[1])


@replaces(
    PACKED_ORDER,
    "layout of gated delta net, packed documents",
    "cu_seqlens cp_size t_global",
    called_by="gated delta net",
    otherwise="gated delta net would see the tokens of a pack in another order",
    when=_gated_delta_net,
    late=True,
)
def replace_packed_order(call: Call) -> tuple[Tensor, Tensor]:
    """Replaces ``_build_thd_cp_a2a_perm``: both permutations of a pack, for gated delta net."""
    where = call["cu_seqlens"]
    return _orders(_batch(call["t_global"], call["cp_size"], where), where.device)


@replaces(
    "megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens",
    "packed documents of any length in gated delta net",
    "cu_seqlens_padded cu_seqlens_actual total_seq_len name",
    optional="cp_size",
    called_by="gated delta net",
    otherwise="states would leak from one document of a pack into the next",
    when=_gated_delta_net,
    late=True,
)
def replace_resolve_cu_seqlens(call: Call) -> Tensor:
    """Replaces ``_resolve_cu_seqlens``: documents of any length, and padding after the last."""
    padded = call["cu_seqlens_padded"]
    places = call["cu_seqlens_actual"] if padded is None else padded
    found = MicroBatch.find(runtime.context_parallel(), places, call["total_seq_len"]).documents
    assert found is not None, "the bounds of a pack"
    return found.starts


def keeps_layout(module: torch.nn.Module) -> bool:
    """Whether a layer without attention mixes tokens in the plugin's layout."""
    inner = module.self_attention if isinstance(module, TransformerLayer) else getattr(module, "mixer", module)
    kind = type(inner)
    if runtime.settings().delta_net is not None and "gated_delta" in kind.__module__:
        return delta_net.replaced(inner)  # not its later variants
    return REORDER in installed() and kind.__module__.startswith(compat.STATE_SPACES)


def converts(module: torch.nn.Module) -> bool:
    """Whether Megatron's layout manager (0.20 and newer) converts tokens between the layers of this stack."""
    manager = getattr(module, "_cp_layout_manager", None)
    return manager is not None and manager.requires_conversion


def _batch(tokens: int, size: int, packed: PackedSeqParams | Tensor | None) -> MicroBatch:
    """The micro-batch of a layer on so many context-parallel ranks; other args as of ``MicroBatch.find``."""
    cp = runtime.between_layers(runtime.context_parallel())
    assert cp.size == size, f"states of {size} context-parallel ranks in a model of {cp.size}"
    return MicroBatch.find(cp, packed, tokens)


def _orders(batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token -> row of the concatenated shards, and row -> token."""
    asked = batch.cp.layout, batch.cp.numbers, batch.tokens, device
    return _kept.get(asked, lambda: _of_layout(*asked))


def _of_layout(layout: Layout, numbers: tuple[int, ...], tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    held = torch.cat([layout.positions(tokens, len(numbers), number) for number in numbers])
    return held.argsort().to(device), held.to(device)


_kept: Recent[tuple[Layout, tuple[int, ...], int, torch.device], tuple[Tensor, Tensor]] = Recent(
    KEPT_BYTES, lambda orders: sum(x.nbytes for x in orders)
)
