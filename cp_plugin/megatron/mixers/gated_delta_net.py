"""Gated delta net: by a provider of linear attention, or by Megatron's own all-to-all of heads (``mamba``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import softplus

from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.micro_batch import MicroBatch
from cp_plugin.megatron.mixers import mamba
from cp_plugin.megatron.mixers.mixer import Mixer
from cp_plugin.megatron.patches.patching import Call, Run, installed, replaces

PACKED_ORDER = "megatron.core.ssm.gated_delta_net.common:_build_thd_cp_a2a_perm"
FORWARD = "megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet.forward"
NORM = "megatron.core.ssm.gated_delta_net.common:l2norm"
_OF_ANY_ATTENTION = (
    "attention_mask key_value_states attention_bias sequence_len_offset yarn_mscale kwargs pg_collection "
    "rotary_pos_emb rotary_pos_cos rotary_pos_sin rotary_pos_cos_sin"
)
"""Parameters of every attention layer that gated delta net has no use for."""


def _exchanges_heads(run: Run) -> bool:
    return mamba.exchanges_heads(run) and "G" in run.pattern and run.settings.delta_net is None


@replaces(
    PACKED_ORDER,
    "layout of gated delta net, packed documents",
    "cu_seqlens cp_size t_global",
    otherwise="gated delta net would see the tokens of a pack in another order",
    when=_exchanges_heads,
)
def replace_packed_order(call: Call) -> tuple[Tensor, Tensor]:
    """Replaces ``_build_thd_cp_a2a_perm``: both permutations of a pack, for gated delta net."""
    where = call["cu_seqlens"]
    return mamba.orders(mamba.batch_of(call["t_global"], call["cp_size"], where), where.device)


@replaces(
    "megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens",
    "packed documents of any length in gated delta net",
    "cu_seqlens_padded cu_seqlens_actual total_seq_len name",
    optional="cp_size",
    otherwise="states would leak from one document of a pack into the next",
    when=_exchanges_heads,
)
def replace_resolve_cu_seqlens(call: Call) -> Tensor:
    """Replaces ``_resolve_cu_seqlens``: documents of any length, and padding after the last."""
    padded = call["cu_seqlens_padded"]
    places = call["cu_seqlens_actual"] if padded is None else padded
    documents = MicroBatch.find(runtime.context_parallel(), places, call["total_seq_len"]).documents
    assert documents is not None, "the bounds of a pack"
    return documents.starts


@replaces(
    FORWARD,
    "context parallelism of gated delta net",
    "hidden_states packed_seq_params inference_context inference_params",
    optional=_OF_ANY_ATTENTION,
    otherwise="gated delta net would not match a single rank's",
    when=lambda run: run.settings.delta_net is not None,
)
def replace_forward(call: Call) -> tuple[Tensor, Tensor | None]:
    """Replaces ``GatedDeltaNet.forward``: by a provider of linear attention (``--cp-linear-provider``).

    Megatron    hidden -> q k v z beta alpha --all-to-all--> whole sequence, some heads -> convolution, rule --back-->
    here        hidden -> q k v z beta alpha -> convolution of this rank's tokens, with those before them from the
                neighbours (``attention.convolution``) -> the rule, by the provider -> norm, gate -> hidden

    Every rank keeps its tokens and has all heads, so there may be more ranks than heads.

    Returns:
        Outputs and the bias that Megatron adds later: ``[s/cp, b, h]`` and ``[h]`` or None; with sequence parallelism
        ``[s/cp/tp, b, h]``.
    """
    layer: Any = call["self"]
    context = call["inference_context"] or call["inference_params"]
    if context is not None:
        raise ValueError("gated delta net layers do not support inference: their state is not kept yet")
    hidden, packed = call["hidden_states"], call["packed_seq_params"]
    groups = call.arguments.get("pg_collection") or layer.pg_collection
    cp = runtime.batch_layout(runtime.context_parallel(groups.cp, "linear"))
    projected, _ = layer.in_proj(hidden)
    out, gate = attend(layer, MicroBatch.find(cp, packed, projected.size(0) * cp.size), projected)
    return layer.out_proj(layer._apply_gated_norm(out, gate).view(*out.shape[:2], -1))


def attend(layer: Any, batch: MicroBatch, projected: Tensor) -> tuple[Tensor, Tensor]:
    """Convolution and delta rule of one layer.

    Args:
        projected: of this rank's tokens: ``[s/cp, b, q + k + v + z + beta + alpha]``.

    Returns:
        The rule's outputs and their gate z, both ``[s/cp, b, heads, value size]``.
    """
    keys, values, heads = layer.qk_dim_local_tp, layer.v_dim_local_tp, layer.num_v_heads_local_tp
    mixed, gate, beta, alpha = projected.split((2 * keys + values, values, heads, heads), 2)
    weight, bias = layer.conv1d.weight.squeeze(1), layer.conv1d.bias
    mixed = layer.act_fn(short_convolution(batch.cp, mixed, weight, bias, cu_seqlens=batch.bounds))
    both, v = mixed.split((2 * keys, values), 2)
    both = both.unflatten(2, (-1, layer.key_head_dim))
    if layer.use_qk_l2norm:
        both = compat.find(NORM)[1](both.contiguous())
    repeat = layer.num_value_heads // layer.num_key_heads
    q, k = (y.repeat_interleave(repeat, 2) for y in both.chunk(2, 2))
    v, gate = (y.unflatten(2, (heads, -1)) for y in (v, gate))
    wide = accumulation_dtype(alpha.dtype)
    decay = -layer.A_log.to(wide).exp() * softplus(alpha.to(wide) + layer.dt_bias)
    scale = layer.key_head_dim**-0.5
    out = batch.cp.linear_attention(q, k, v, decay, beta=beta.sigmoid(), scale=scale, cu_seqlens=batch.bounds)
    return out, gate


MIXER = Mixer(
    name="gated delta net",
    kind="linear",
    computes=lambda module: FORWARD in installed() and type(module).__name__ == "GatedDeltaNet",
    letter="G",
    layer="megatron.core.ssm.gated_delta_net.gdn:GatedDeltaNet",
    kernels="HAVE_FLA",
    patches=(replace_packed_order, replace_resolve_cu_seqlens, replace_forward),
)
