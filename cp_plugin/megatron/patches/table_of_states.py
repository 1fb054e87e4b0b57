"""The symbols that a run with linear attention, Mamba or gated delta net replaces; part of ``table``."""

from __future__ import annotations

from cp_plugin.megatron.layers import gate
from cp_plugin.megatron.patches import delta_net, flops, hybrid
from cp_plugin.megatron.patches.contract import replaces, wraps
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.patches.run import Run


def _states(run: Run) -> bool:
    """Mamba, or gated delta net by Megatron's own all-to-all."""
    return run.settings.active and run.hybrid


def _gated_delta_net(run: Run) -> bool:
    return _states(run) and "G" in run.pattern and run.settings.delta_net is None


LINEAR = (
    Patch(
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        gate.replace_get_query_key_value,
        "gate of gated linear attention",
        wraps("hidden_states"),
        called_by="SelfAttention",
        otherwise="gated linear attention would train without its gate",
        when=lambda run: run.settings.linear is not None and run.settings.linear.kind.gated,
    ),
    Patch(
        "megatron.training.training:num_floating_point_operations",
        flops.replace_num_floating_point_operations,
        "floating point operations of linear layers",
        wraps("args", "batch_size"),
        called_by="the training loop",
        otherwise="the logged throughput would be that of quadratic attention",
        when=lambda run: run.settings.linear is not None,
    ),
)

HYBRID = (
    Patch(
        hybrid.REORDER,
        hybrid.replace_undo,
        "layout of Mamba and gated delta net",
        replaces("input_", "cp_size", "packed_seq_params"),
        called_by="Mamba and gated delta net",
        otherwise="states would see the tokens in another order",
        when=_states,
    ),
    Patch(
        "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
        hybrid.replace_redo,
        "layout of Mamba and gated delta net, on the way back",
        replaces("input_", "cp_size", "packed_seq_params"),
        called_by="Mamba and gated delta net",
        otherwise="layers after it would see the tokens in another order",
        when=_states,
    ),
    Patch(
        hybrid.PACKED_ORDER,
        hybrid.replace_packed_order,
        "layout of gated delta net, packed documents",
        replaces("cu_seqlens", "cp_size", "t_global"),
        called_by="gated delta net",
        otherwise="gated delta net would see the tokens of a pack in another order",
        when=_gated_delta_net,
        late=True,
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens",
        hybrid.replace_resolve_cu_seqlens,
        "packed documents of any length in gated delta net",
        replaces("cu_seqlens_padded", "cu_seqlens_actual", "total_seq_len", "name", optional=("cp_size",)),
        called_by="gated delta net",
        otherwise="states would leak from one document of a pack into the next",
        when=_gated_delta_net,
        late=True,
    ),
)

_OF_ANY_ATTENTION = (
    *("attention_mask", "key_value_states", "attention_bias", "sequence_len_offset", "yarn_mscale", "kwargs"),
    "pg_collection",
    *("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "rotary_pos_cos_sin"),
)
"""Parameters of every attention layer that gated delta net has no use for."""
DELTA_NET = (
    Patch(
        delta_net.FORWARD,
        delta_net.replace_forward,
        "context parallelism of gated delta net",
        replaces(
            "hidden_states", "packed_seq_params", "inference_context", "inference_params", optional=_OF_ANY_ATTENTION
        ),
        called_by="the layer's module call",
        otherwise="gated delta net would not match a single rank's",
        when=lambda run: run.settings.delta_net is not None,
    ),
)
