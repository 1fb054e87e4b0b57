"""Hooks into Megatron's argument parsing and start, and installation of the patches that a run needs.

``START_UP`` is always in place: it adds the flags, checks them and compares them between ranks, and does not change a
training. The patches that a run needs (``OF_RUN``) are declared beside the code that replaces, with reason, contract
and condition, and installed once its arguments are valid. Megatron's interfaces serve where they can: a spec provider's
core attention, and the hook for extensions that ``native`` uses.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cp_plugin import __version__
from cp_plugin.engine.attention.recompute import Recomputed
from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.common import refusals
from cp_plugin.engine.common.text import group_ranks, ranks_named
from cp_plugin.megatron import groups, runtime
from cp_plugin.megatron.compat import megatron_version
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args, early
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.mixers import fp8_scaling, modelopt, spec, table
from cp_plugin.megatron.patches import batch, loss, mtp, padding, patching, rope
from cp_plugin.megatron.patches.patching import Call, Run, wraps
from cp_plugin.megatron.rules import checks
from cp_plugin.megatron.selfcheck import audit, first_step, recheck, slices, step
from cp_plugin.megatron.startup import checkpoint, failures
from cp_plugin.megatron.state import STATE, Model


@wraps(
    "megatron.core.parallel_state:initialize_model_parallel",
    "comparison of the ranks' flags, and process groups",
    "distributed_timeout_minutes",
    otherwise="ranks with different flags would wait for each other forever",
)
def replace_initialize_model_parallel(call: Call) -> None:
    """Replacement for ``initialize_model_parallel``: compare the ranks' flags, create the plugin's groups."""
    STATE.by_ranks.clear()  # of groups that were destroyed meanwhile
    rope.forget_cached_embeddings()
    failures.exchange_reports()
    require_same_flags()
    call.original()
    if runtime.settings().active:
        options = groups.options_from(call.arguments)
        groups.create(runtime.settings(), options, runtime.model())
        checkpoint.note()


@wraps(
    "megatron.training.training:setup_model_and_optimizer",
    "audit and self-check of the model",
    otherwise="a model without the provider's attention would train",
    when=Run.is_compared,
)
def replace_setup_model_and_optimizer(call: Call) -> Any:
    """Replacement for ``setup_model_and_optimizer``: audit before training, and the self-check of its first step."""
    result = call.original()
    chunks, optimizer, rates = result if isinstance(result, tuple) else vars(result).values()  # in this order
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
    """ValueError on every rank if ranks have other flags, or versions; collective over the default process group.

    A rank with another layout, provider or sequence length would not fail, but train on tokens at the wrong positions.
    The flags are what Megatron has parsed, or Bridge's (``STATE.compared``); without either nothing is compared.
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


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser that has all of Megatron's."""
    parser = args.add_arguments(parser)
    args.repair_help(parser)
    early.shorten_errors(parser)
    if cpu.active():
        cpu.set_flag_defaults(parser)
    return parser


@contextmanager
def validation(parsed: argparse.Namespace) -> Iterator[None]:
    """Around Megatron's validation: check the flags before and after, then start what they ask for."""
    settings = args.settings_from(parsed)
    if cpu.active():
        cpu.check_flags(parsed)
        checks.need_provider_on_cpu(parsed, settings)
    if not settings.active:
        start(settings, None, parsed)
        yield
        return
    checks.check_parsed(parsed, settings)
    with checks.lift_divisor(parsed, settings):
        yield
    if settings.undecided:
        from cp_plugin.megatron.planned import auto  # imports the whole planner

        settings = auto.decide(parsed, settings, may_leave=True)
        if not settings.active:
            start(settings, None, parsed)
            return
        checks.count_tokens(parsed, settings)
    model = checks.check_validated(parsed, settings, _device())
    start(settings, model, parsed)


def _device() -> torch.device:
    """This rank's device, which Megatron sets later; querying device 0 would create a context there on every rank."""
    if cpu.active():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))


@wraps(
    "megatron.training.arguments:add_megatron_arguments",
    "the plugin's flags, and a refusal of a YAML file that would drop them",
    otherwise="the plugin's flags would be unknown",
)
def _add_arguments(call: Call) -> argparse.ArgumentParser:
    args.refuse_yaml(sys.argv[1:])
    return add_arguments(call.original())


@wraps(
    "megatron.training.arguments:validate_args",
    "checks of the flags",
    "args",
    otherwise="flags that do not fit would crash later, or go unnoticed",
)
def _validate_args(call: Call) -> argparse.Namespace:
    with refusals.output_held():
        try:
            with validation(call["args"]):
                return call.original()
        except Exception as error:
            if refusals.message_of(error) is not None:
                raise
            raise ValueError(early.reason(error)) from error


def start(settings: Settings, model: Model | None = None, parsed: argparse.Namespace | None = None) -> None:
    """Make these the settings of the process, and install the patches they need; ValueError for a broken contract.

    model: the resolved attention; None: no flags described one.
    parsed: Megatron's arguments; None: unknown, so that all patches of a provider are installed.
    """
    runtime.configure(settings, model)
    run = Run(settings=settings, args=parsed)
    patching.install([patch for patch in OF_RUN if patch.when(run)])  # at once: scans all modules

    def complete(chunks: Sequence[torch.nn.Module]) -> None:
        models = [patching.inner_model(chunk) for chunk in chunks]
        with_models = replace(run, built=[*models, *(getattr(one, "config", None) for one in models)])
        patching.install([patch for patch in OF_RUN if patch.when(with_models)])

    STATE.complete = complete
    if settings.active:
        modelopt.register()
    rope.forget_cached_embeddings()


@wraps(
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    "attention of the spec of hybrid models; on the CPU, a spec without Transformer Engine",
    "hybrid_stack_spec config",
    otherwise="a hybrid model would keep Megatron's own attention",
    when=lambda run: bool(run.pattern) and (run.settings.active or cpu.active()),
)
def replace_hybrid_model(call: Call) -> None:
    """Give ``HybridModel`` the plugin's core attention, and on the CPU a spec without Transformer Engine."""
    stack = call["hybrid_stack_spec"]
    if cpu.active():
        from cp_plugin.megatron.models import hybrid  # imports much of Megatron

        stack = hybrid.use_local_spec(stack, call["config"], call.arguments.get("hybrid_layer_pattern") or "")
    call.original(hybrid_stack_spec=spec.with_core_attention(stack) if runtime.settings().active else stack)


@wraps(
    "megatron.core.tensor_parallel.random:checkpoint",
    "attention's results in recomputation",
    otherwise="attention would be computed, and its keys sent, twice",
    when=lambda run: run.settings.active and not run.settings.recompute_attention and run.has("recompute_granularity"),
)
def replace_checkpoint(call: Call) -> Any:
    """Recompute without attention (``attention.recompute``); the first parameter is the function that is run twice.

    Megatron passes layers to ``tensor_parallel.checkpoint``, or with FP8 to Transformer Engine's checkpoint.
    """
    if not torch.is_grad_enabled():  # evaluation: no second run
        return call.original()
    name, function = next(iter(call.arguments.items()))
    return call.original(**{name: Recomputed(function)})


COMMAND_LINE = (_add_arguments, _validate_args)
"""Not needed where Megatron has a hook for extensions: see ``native``."""

START_UP = (*COMMAND_LINE, replace_initialize_model_parallel, checkpoint.replace_load_base_checkpoint)
OF_RUN = (
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
    spec.IN_TRANSFORMER_ENGINE,
    modelopt.replace_gpt_spec,
    replace_setup_model_and_optimizer,
    step.replace_get_forward_backward_func,
    first_step.replace_training_log,
    replace_checkpoint,
    replace(replace_checkpoint, target="megatron.core.extensions.transformer_engine:te_checkpoint"),
    padding.replace_router_forward,
    padding.replace_token_counts,
    fp8_scaling.replace_finalize_model_grads,
    *table.PATCHES,
    replace_hybrid_model,
    batch.replace_dataset_builder,
)
"""Installed once the flags are valid: those whose ``when`` is true of the run."""
