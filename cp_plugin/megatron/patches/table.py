"""The symbols of Megatron-Core that a run replaces: which, by what, and why. ``hooks`` says when.

What each one looks like in the supported versions is in ``fingerprints``. CPU mode, the compiled dataset helper of a
wheel, and the processes that plan a training replace a few more, in ``cpu`` and ``flags``: ``digest.targets`` has all.
"""

from __future__ import annotations

from cp_plugin.megatron import compat
from cp_plugin.megatron.layers import fp8_scaling, gate, modelopt, spec
from cp_plugin.megatron.patches import batch, flops, hybrid, loss, mtp, packing, padding, recompute, rope
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.selfcheck import step_traffic
from cp_plugin.megatron.startup import checkpoint, lifecycle

ALWAYS = (
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        make=lifecycle.replace_initialize_model_parallel,
        reason="comparison of the ranks' flags, and process groups",
    ),
    Patch(
        target="megatron.training.checkpointing:_load_base_checkpoint",
        make=checkpoint.replace_load_base_checkpoint,
        reason="settings that a checkpoint was saved with",
    ),
)

PROVIDER = (
    Patch(
        target="megatron.core.parallel_state:destroy_model_parallel",
        make=lifecycle.replace_destroy_model_parallel,
        reason="process groups",
    ),
    Patch(
        target="megatron.core.utils:get_batch_on_this_cp_rank",
        make=batch.replace_get_batch,
        reason="layout of the batch",
    ),
    Patch(
        target="megatron.core.context_parallel.utils:get_batches_on_this_cp_rank",
        make=batch.replace_get_batches,
        reason="layout of the batch, where a script may ask for several",
        versions=compat.slices_in_several_layouts,
    ),
    Patch(
        target="megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
        make=rope.replace_get_pos_emb,
        reason="layout of RoPE",
    ),
    Patch(
        target="megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache",
        make=rope.replace_set_cos_sin_cache,
        reason="a table of YaRN angles that belongs to another length",
    ),
    Patch(
        target="megatron.core.models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd",
        make=packing.replace_apply_rotary_thd,
        reason="layout of RoPE, packed documents",
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:roll_tensor",
        make=mtp.replace_roll_tensor,
        reason="layout of multi-token prediction",
    ),
    Patch(
        target="megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        make=mtp.replace_process_mtp_loss,
        reason="token counts of multi-token prediction",
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        make=loss.replace_calc_loss,
        reason="token counts of the loss",
    ),
    Patch(
        target="megatron.core.models.backends:LocalSpecProvider.core_attention",
        make=spec.replace_core_attention,
        reason="attention of the local spec",
    ),
    Patch(
        target="megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention",
        make=spec.replace_core_attention,
        reason="attention of the Transformer Engine spec",
    ),
    Patch(
        target=modelopt.SPEC,
        make=modelopt.replace_gpt_spec,
        reason="attention of the spec for nvidia-modelopt",
    ),
    Patch(
        target="megatron.training.training:setup_model_and_optimizer",
        make=lifecycle.replace_setup_model_and_optimizer,
        reason="audit and self-check of the model",
    ),
    Patch(
        target="megatron.training.training:training_log",
        make=step_traffic.replace_training_log,
        reason="traffic at each log interval (--cp-log-traffic)",
    ),
)

RECOMPUTE = tuple(
    Patch(target=target, make=recompute.replace_checkpoint, reason="attention's results in recomputation")
    for target in (
        "megatron.core.tensor_parallel.random:checkpoint",
        "megatron.core.extensions.transformer_engine:te_checkpoint",
    )
)

PADDING = (
    Patch(
        target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        make=padding.replace_get_forward_backward_func,
        reason="length of padded sequences",
    ),
    Patch(
        target="megatron.core.transformer.moe.router:TopKRouter.forward",
        make=padding.replace_router_forward,
        reason="padding, which experts do not balance",
    ),
    Patch(
        target="megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        make=padding.replace_token_counts,
        reason="token counts of experts in padded sequences",
    ),
)

SCALING = (
    Patch(
        target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        make=fp8_scaling.replace_finalize_model_grads,
        reason="scales of FP8 attention",
    ),
)

LINEAR = (
    Patch(
        target="megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors",
        make=gate.replace_get_query_key_value,
        reason="gate of gated linear attention",
    ),
    Patch(
        target="megatron.training.training:num_floating_point_operations",
        make=flops.replace_num_floating_point_operations,
        reason="floating point operations of linear layers",
    ),
)

HYBRID = (
    Patch(target=hybrid.REORDER, make=hybrid.replace_undo, reason="layout of Mamba and gated delta net"),
    Patch(
        target="megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
        make=hybrid.replace_redo,
        reason="layout of Mamba and gated delta net, on the way back",
    ),
    Patch(
        target="megatron.core.ssm.gated_delta_net.common:_build_thd_cp_a2a_perm",
        make=hybrid.replace_packed_order,
        reason="layout of gated delta net, packed documents",
        versions=compat.builds_gated_delta_net,
    ),
    Patch(
        target="megatron.core.ssm.gated_delta_net.common:_GDNBase._resolve_cu_seqlens",
        make=hybrid.replace_resolve_cu_seqlens,
        reason="packed documents of any length in gated delta net",
        versions=compat.builds_gated_delta_net,
    ),
)
