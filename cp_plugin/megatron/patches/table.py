"""The symbols of Megatron-Core that a run replaces, in order; ``hooks`` installs them.

Each is declared beside the code that replaces it: why, by which contract, and when. Megatron's interfaces come first
where they serve: a spec provider's core attention, and the hook for extensions that ``native`` uses. CPU mode, the
wheel's compiled dataset helper and the planner's processes replace a few more.
"""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.megatron.layers import fp8_scaling, gate, modelopt, spec
from cp_plugin.megatron.patches import batch, delta_net, flops, hybrid, loss, mtp, padding, recompute, rope
from cp_plugin.megatron.selfcheck import first_step, step
from cp_plugin.megatron.startup import checkpoint, lifecycle

ALWAYS = (lifecycle.replace_initialize_model_parallel, checkpoint.LOADING)
PROVIDER = (
    batch.replace_get_batch,
    batch.replace_get_thd_batch,
    batch.replace_get_batches,
    rope.replace_get_pos_emb,
    rope.replace_set_cos_sin_cache,
    rope.replace_apply_rotary_thd,
    mtp.replace_roll_tensor,
    mtp.replace_process_mtp_loss,
    loss.replace_calc_loss,
    spec.replace_core_attention,
    replace(
        spec.replace_core_attention,
        target="megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention",
        reason="attention of the Transformer Engine spec",
    ),
    modelopt.replace_gpt_spec,
    lifecycle.replace_setup_model_and_optimizer,
    step.replace_get_forward_backward_func,
    first_step.replace_training_log,
)
RECOMPUTE = (
    recompute.replace_checkpoint,
    replace(recompute.replace_checkpoint, target="megatron.core.extensions.transformer_engine:te_checkpoint"),
)
PADDING = (padding.replace_router_forward, padding.replace_token_counts)
SCALING = (fp8_scaling.replace_finalize_model_grads,)
LINEAR = (gate.replace_get_query_key_value, flops.replace_num_floating_point_operations)
HYBRID = (hybrid.replace_undo, hybrid.replace_redo, hybrid.replace_packed_order, hybrid.replace_resolve_cu_seqlens)
DELTA_NET = (delta_net.replace_forward,)
OF_TABLE = (*PROVIDER, *RECOMPUTE, *PADDING, *SCALING, *LINEAR, *HYBRID, *DELTA_NET)
