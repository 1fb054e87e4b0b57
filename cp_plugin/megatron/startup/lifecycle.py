"""Hooks at Megatron's start and end: process groups beside its own, equal flags, checks of the built model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cp_plugin import __version__
from cp_plugin.comm.every_rank import gather_objects
from cp_plugin.common.text import group_ranks, ranks_named
from cp_plugin.megatron import runtime
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.megatron.layers import groups
from cp_plugin.megatron.patches import rope
from cp_plugin.megatron.patches.patching import Call, Run, wraps
from cp_plugin.megatron.selfcheck import audit, recheck, slices, step
from cp_plugin.megatron.startup import checkpoint, failures
from cp_plugin.megatron.state import STATE


@wraps(
    "megatron.core.parallel_state:initialize_model_parallel",
    "comparison of the ranks' flags, and process groups",
    "distributed_timeout_minutes",
    called_by="Megatron's initialization",
    otherwise="ranks with different flags would wait for each other forever",
)
def replace_initialize_model_parallel(call: Call) -> None:
    """Replacement for ``initialize_model_parallel``: compare the ranks' flags, create the plugin's groups."""
    STATE.by_ranks.clear()  # of groups that were destroyed meanwhile
    rope.forget_cached_embeddings()
    failures.watch(60.0 * call["distributed_timeout_minutes"])
    require_same_flags()
    call.original()
    if runtime.settings().active:
        options = groups.options_from(call.arguments)
        groups.create(runtime.settings(), options, runtime.model())
        checkpoint.note()


@wraps(
    "megatron.training.training:setup_model_and_optimizer",
    "audit and self-check of the model",
    called_by="pretrain",
    otherwise="a model without the provider's attention would train",
    when=Run.is_compared,
)
def replace_setup_model_and_optimizer(call: Call) -> Any:
    """Replacement for ``setup_model_and_optimizer``: audit before training, and the self-check of its first step."""
    result = call.original()
    chunks, optimizer, rates = _parts(result)
    if not runtime.settings().active:
        step.expect(optimizer, rates)
        return result
    STATE.complete(chunks)
    audit.run(chunks)
    if runtime.settings().selfcheck:
        step.expect(optimizer, rates)
    STATE.first_batch = slices.require_one_batch
    recheck.watch(chunks, lambda: failures.finished_steps() or 0)
    STATE.cut.packed = runtime.packs()
    return result


def _parts(made: Any) -> Sequence[Any]:
    """Model, optimizer and learning rates, in this order, of a tuple or an object with these attributes."""
    return made if isinstance(made, tuple) else list(vars(made).values())


_MEGATRON_FLAGS = (  # attributes of Megatron's parsed arguments
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "virtual_pipeline_model_parallel_size use_tp_pp_dp_mapping sequence_parallel micro_batch_size global_batch_size "
    "seq_length max_position_embeddings num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
    "group_query_attention kv_channels position_embedding_type rotary_base rotary_percent rotary_interleaved "
    "rotary_seq_len_interpolation_factor use_rope_scaling rope_scaling_factor apply_rope_fusion attention_dropout "
    "no_rope_freq mrope_section rope_type rotary_scaling_factor mscale mscale_all_dim multi_latent_attention "
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "apply_query_key_layer_scaling qk_layernorm params_dtype transformer_impl spec recompute_granularity "
    "recompute_modules recompute_method recompute_num_layers calculate_per_token_loss "
    "mtp_num_layers hybrid_layer_pattern "
    "create_attention_mask_in_dataloader cp_comm_type train_iters train_samples log_interval"
)


def require_same_flags() -> None:
    """Gather the flags of all ranks and compare them; collective over the default process group.

    A rank with another layout, provider or sequence length would not fail, but train on tokens at the wrong positions.
    The flags are what Megatron has parsed, or Bridge's (``STATE.compared``); without either nothing is compared.

    Raises:
        ValueError: on every rank, naming each flag that differs, its values and their ranks.
    """
    from megatron.training import global_vars

    args = global_vars._GLOBAL_ARGS if STATE.compared is None else STATE.compared
    if args is None:
        return
    if problem := difference(gather_objects(canonical(args))):
        raise ValueError(problem)


def canonical(args: argparse.Namespace) -> dict[str, str]:
    """The flags that must agree, as text, and the library versions."""
    names = sorted(name for name in vars(args) if name.startswith("cp_")) + _MEGATRON_FLAGS.split()
    flags = {f"--{name.replace('_', '-')}": repr(getattr(args, name)) for name in names if hasattr(args, name)}
    return {**flags, "cp_plugin": __version__, "megatron-core": megatron_version(), "torch": torch.__version__}


def difference(everyone: Sequence[Mapping[str, str]]) -> str | None:
    """Return the message for flags that differ, such as ``--seed is 0 on rank 0 and 1 on ranks 1-3``, or None."""
    parts = []
    for key in dict.fromkeys(key for one in everyone for key in one):
        ranks_of = group_ranks([one.get(key, "missing") for one in everyone])
        if len(ranks_of) > 1:
            values = " and ".join(f"{value} on {ranks_named(having)}" for value, having in ranks_of.items())
            parts.append(f"{key} is {values}")
    if not parts:
        return None
    return f"the ranks were started with different settings: {'; '.join(parts)}. Start all ranks with the same flags"
