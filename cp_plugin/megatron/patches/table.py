"""The symbols of Megatron-Core that a run replaces, with what and why; ``hooks`` installs them.

CPU mode, the wheel's compiled dataset helper and the planner's processes replace a few more: see ``digest.targets``.
"""

from __future__ import annotations

from cp_plugin.megatron import compat
from cp_plugin.megatron.layers import fp8_scaling, gate, modelopt, spec
from cp_plugin.megatron.patches import batch, delta_net, flops, hybrid, loss, mtp, packing, padding, recompute, rope
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.selfcheck import step_traffic
from cp_plugin.megatron.startup import checkpoint, lifecycle

ALWAYS = (
    Patch(
        "megatron.core.parallel_state:initialize_model_parallel",
        lifecycle.replace_initialize_model_parallel,
        "comparison of the ranks' flags, and process groups",
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        checkpoint.replace_load_base_checkpoint,
        "settings that a checkpoint was saved with",
    ),
)

PROVIDER = (
    Patch(
        "megatron.core.parallel_state:destroy_model_parallel",
        lifecycle.replace_destroy_model_parallel,
        "process groups",
    ),
    Patch("megatron.core.utils:get_batch_on_this_cp_rank", batch.replace_get_batch, "layout of the batch"),
    Patch(
        "megatron.core.context_parallel.utils:get_batches_on_this_cp_rank",
        batch.replace_get_batches,
        "layout of the batch, where a script may ask for several",
        versions=compat.slices_in_several_layouts,
    ),
    Patch(
        "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
        rope.replace_get_pos_emb,
        "layout of RoPE",
    ),
    Patch(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache",
        rope.replace_set_cos_sin_cache,
        "a table of YaRN angles that belongs to another length",
    ),
    Patch(
        "megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
        packing.replace_apply_rotary_thd,
        "layout of RoPE, packed documents",
    ),
    Patch(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        mtp.replace_roll_tensor,
        "layout of multi-token prediction",
    ),
    Patch(
        "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        mtp.replace_process_mtp_loss,
        "token counts of multi-token prediction",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        loss.replace_calc_loss,
        "token counts of the loss",
    ),
    Patch(
        "megatron.core.models.backends:LocalSpecProvider.core_attention",
        spec.replace_core_attention,
        "attention of the local spec",
    ),
    Patch(
        "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention",
        spec.replace_core_attention,
        "attention of the Transformer Engine spec",
    ),
    Patch(modelopt.SPEC, modelopt.replace_gpt_spec, "attention of the spec for nvidia-modelopt"),
    Patch(
        "megatron.training.training:setup_model_and_optimizer",
        lifecycle.replace_setup_model_and_optimizer,
        "audit and self-check of the model",
    ),
    Patch(
        "megatron.training.training:training_log",
        step_traffic.replace_training_log,
        "traffic at each log interval (--cp-log-traffic)",
    ),
)

RECOMPUTE = tuple(
    Patch(target, recompute.replace_checkpoint, "attention's results in recomputation")
    for target in (
        "megatron.core.tensor_parallel.random:checkpoint",
        "megatron.core.extensions.transformer_engine:te_checkpoint",
    )
)

PADDING = (
    Patch(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        padding.replace_get_forward_backward_func,
        "length of padded sequences",
    ),
    Patch(
        "megatron.core.transformer.moe.router:TopKRouter.forward",
        padding.replace_router_forward,
        "padding, which experts do not balance",
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        padding.replace_token_counts,
        "token counts of experts in padded sequences",
    ),
)

SCALING = (
    Patch(
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        fp8_scaling.replace_finalize_model_grads,
        "scales of FP8 attention",
    ),
)

LINEAR = (
    Patch(
        "megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        gate.replace_get_query_key_value,
        "gate of gated linear attention",
    ),
    Patch(
        "megatron.training.training:num_floating_point_operations",
        flops.replace_num_floating_point_operations,
        "floating point operations of linear layers",
    ),
)

HYBRID = (
    Patch(hybrid.REORDER, hybrid.replace_undo, "layout of Mamba and gated delta net"),
    Patch(
        "megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
        hybrid.replace_redo,
        "layout of Mamba and gated delta net, on the way back",
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.common:_build_thd_cp_a2a_perm",
        hybrid.replace_packed_order,
        "layout of gated delta net, packed documents",
        versions=compat.builds_gated_delta_net,
    ),
    Patch(
        "megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens",
        hybrid.replace_resolve_cu_seqlens,
        "packed documents of any length in gated delta net",
        versions=compat.builds_gated_delta_net,
    ),
)

DELTA_NET = (
    Patch(
        delta_net.FORWARD,
        delta_net.replace_forward,
        "context parallelism of gated delta net",
        versions=compat.builds_gated_delta_net,
    ),
)
