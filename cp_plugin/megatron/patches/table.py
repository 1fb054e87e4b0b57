"""The symbols of Megatron-Core that a run replaces: why, by which contract, and when; ``hooks`` installs them.

Megatron's interfaces come first where they serve: a spec provider's core attention, and the hook for extensions that
``native`` uses. What has no interface is wrapped, or replaced, by the contract beside it (``contract``); ``otherwise``
says what would go wrong, silently, if the contract were broken. CPU mode, the wheel's compiled dataset helper and the
planner's processes replace a few more.
"""

from __future__ import annotations

from cp_plugin.megatron.layers import fp8_scaling, modelopt, spec
from cp_plugin.megatron.patches import (
    batch,
    loss,
    mtp,
    packing,
    padding,
    recompute,
    rope,
)
from cp_plugin.megatron.patches.contract import registers, replaces, wraps
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.patches.run import Run
from cp_plugin.megatron.patches.table_of_states import DELTA_NET, HYBRID, LINEAR
from cp_plugin.megatron.rules.cuda_graphs import captures_experts
from cp_plugin.megatron.selfcheck import first_step, step
from cp_plugin.megatron.startup import checkpoint, lifecycle

ALWAYS = (
    Patch(
        "megatron.core.parallel_state:initialize_model_parallel",
        lifecycle.replace_initialize_model_parallel,
        "comparison of the ranks' flags, and process groups",
        wraps("distributed_timeout_minutes"),
        called_by="Megatron's initialization",
        otherwise="ranks with different flags would wait for each other forever",
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        checkpoint.replace_load_base_checkpoint,
        "settings that a checkpoint was saved with",
        wraps("load_dir", "args", "rank0", "sharded_state_dict"),
        called_by="Megatron's loading of checkpoints, and its reading of arguments from them",
        otherwise="a checkpoint with other layers would be loaded as if it had these",
    ),
)


def _provider(run: Run) -> bool:
    return run.settings.active


def _compared(run: Run) -> bool:
    return run.settings.active or run.settings.of_stock


def _mtp(run: Run) -> bool:
    return run.settings.active and run.has("mtp_num_layers")


def _recompute(run: Run) -> bool:
    return run.settings.active and not run.settings.recompute_attention and run.has("recompute_granularity")


PROVIDER = (
    Patch(
        "megatron.core.utils:get_batch_on_this_cp_rank",
        batch.replace_get_batch,
        "layout of the batch",
        replaces(
            "batch",
            optional=(
                "cp_group",
                "is_hybrid_cp",
                "hybrid_cp_group_func",
                "use_per_sequence_balancing",
                "use_contiguous_cp",
            ),
        ),
        called_by="the training script",
        otherwise="ranks would train on tokens that do not match their angles and masks",
        when=_provider,
    ),
    Patch(
        "megatron.core.utils:get_thd_batch_on_this_cp_rank",
        batch.replace_get_thd_batch,
        "layout of packed batches, which some versions slice by a function of their own",
        wraps("batch", "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "cp_size"),
        called_by="the training script",
        otherwise="ranks would train on tokens of a pack that do not match their angles and masks",
        when=_provider,
        late=True,
        required=False,
    ),
    Patch(
        "megatron.core.context_parallel.utils:get_batches_on_this_cp_rank",
        batch.replace_get_batches,
        "layout of the batch, if a script may request several",
        wraps("batch", "cp_group", "boundary_layout", "additional_layouts", "use_per_sequence_balancing"),
        called_by="the training script",
        otherwise="ranks would train on tokens that do not match their angles and masks",
        when=_provider,
        required=False,
    ),
    Patch(
        "megatron.core.models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank",
        rope.replace_get_pos_emb,
        "layout of RoPE",
        replaces("pos_emb", "seq_dim", "cp_group"),
        called_by="rotary embeddings",
        otherwise="tokens would be rotated by other tokens' angles",
        when=_provider,
    ),
    Patch(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding._set_cos_sin_cache",
        rope.replace_set_cos_sin_cache,
        "a table of YaRN angles that belongs to another length",
        wraps(),
        called_by="the embedding's constructor",
        otherwise="tokens would be rotated by angles of another length",
        when=_provider,  # a constructor's: a model may have it without a flag
    ),
    Patch(
        packing.ROPE,
        packing.replace_apply_rotary_thd,
        "layout of RoPE, packed documents",
        replaces(
            "t",
            "cu_seqlens",
            "freqs",
            "cp_group",
            optional=(
                "rotary_interleaved",
                "mla_rotary_interleaved",
                "multi_latent_attention",
                "mscale",
                "max_seqlen",
                "inverse",
            ),
        ),
        called_by="attention layers",
        otherwise="tokens of packed documents would be rotated by other tokens' angles",
        when=_provider,
        late=True,
    ),
    Patch(
        "megatron.core.transformer.multi_token_prediction:roll_tensor",
        mtp.replace_roll_tensor,
        "layout of multi-token prediction",
        replaces(
            *("shifts", "dims", "cp_group", "packed_seq_params"),
            optional=("tensor", "return_sum", "tensors", "fill_values", "sequence_fields", "roll_depth"),
        ),
        called_by="multi-token prediction",
        otherwise="multi-token prediction would learn the wrong next tokens",
        when=_mtp,
    ),
    Patch(
        "megatron.core.transformer.multi_token_prediction:process_mtp_loss",
        mtp.replace_process_mtp_loss,
        "token counts of multi-token prediction",
        wraps(*("labels", "loss_mask", "cp_group", "packed_seq_params", "config")),
        called_by="GPTModel and HybridModel",
        otherwise="the loss of multi-token prediction would weight tokens by the rank that holds them",
        when=_mtp,
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        loss.replace_calc_loss,
        "token counts of the loss",
        wraps(*("loss_func", "config", "collect_non_loss_data")),
        called_by="the pipeline schedules",
        otherwise="the loss would weight tokens by the rank that holds them",
        when=_provider,
    ),
    Patch(
        "megatron.core.models.backends:LocalSpecProvider.core_attention",
        spec.replace_core_attention,
        "attention of the local spec",
        registers(),
        otherwise="attention would not match a single rank's",
        when=_provider,
    ),
    Patch(
        "megatron.core.extensions.transformer_engine_spec_provider:TESpecProvider.core_attention",
        spec.replace_core_attention,
        "attention of the Transformer Engine spec",
        registers(),
        otherwise="attention would not match a single rank's",
        when=_provider,
    ),
    Patch(
        modelopt.SPEC,
        modelopt.replace_gpt_spec,
        "attention of the spec for nvidia-modelopt",
        wraps(),
        called_by="the model builder for nvidia-modelopt",
        otherwise="a quantised model would keep Megatron's own attention",
        when=lambda run: run.settings.active and modelopt.found(),
    ),
    Patch(
        "megatron.training.training:setup_model_and_optimizer",
        lifecycle.replace_setup_model_and_optimizer,
        "audit and self-check of the model",
        wraps(),
        called_by="pretrain",
        otherwise="a model without the provider's attention would train",
        when=_compared,
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
        step.replace_get_forward_backward_func,
        "check of the first training step; length of padded sequences",
        wraps(),
        called_by="the training loop",
        otherwise="a step on several ranks would not be compared with one rank's",
        when=_compared,
    ),
    Patch(
        "megatron.training.training:training_log",
        first_step.replace_training_log,
        "comparison of the first logged losses",
        wraps(),
        called_by="the training loop",
        otherwise="a loss could be logged that is not the one trained on",
        when=_compared,
    ),
)

RECOMPUTE = tuple(
    Patch(
        target,
        recompute.replace_checkpoint,
        "attention's results in recomputation",
        wraps(),
        called_by="transformer blocks",
        otherwise="attention would be computed, and its keys sent, twice",
        when=_recompute,
    )
    for target in (
        "megatron.core.tensor_parallel.random:checkpoint",
        "megatron.core.extensions.transformer_engine:te_checkpoint",
    )
)


def _experts(run: Run) -> bool:
    captured = not run.settings.pad_sequence and captures_experts(run.args)  # a graph of Megatron's takes no mask
    return run.settings.active and run.has("num_experts", "num_moe_experts") and not captured


PADDING = (
    Patch(
        "megatron.core.transformer.moe.router:TopKRouter.forward",
        padding.replace_router_forward,
        "padding, excluded from expert load balancing; z-loss by tokens",
        wraps("input", "padding_mask"),
        called_by="MoE layers",
        otherwise="padding would count in expert load balancing, or a z-loss weight tokens by the rank that holds them",
        when=_experts,
    ),
    Patch(
        "megatron.core.transformer.moe.moe_utils:get_tokens_per_expert_and_token_count",
        padding.replace_token_counts,
        "token counts of experts in padded sequences",
        wraps("reduce_group"),
        called_by="routers",
        otherwise="losses of experts would weight tokens by the rank that holds them",
        when=_experts,
    ),
)

SCALING = (
    Patch(
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        fp8_scaling.replace_finalize_model_grads,
        "scales of FP8 attention",
        wraps("model"),
        called_by="the training loop, by a field of the configuration that it sets itself",
        otherwise="ranks would scale the same keys differently",
        when=lambda run: run.settings.active and run.settings.options.fp8 == "compute",
    ),
)

OF_TABLE = (*PROVIDER, *RECOMPUTE, *PADDING, *SCALING, *LINEAR, *HYBRID, *DELTA_NET)
