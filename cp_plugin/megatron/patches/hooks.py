"""Where the plugin enters Megatron: every symbol it replaces, by what, and why.

``START_UP`` is always in place: it adds the flags, checks them, and compares them between ranks, and changes nothing of
a training. ``PROVIDER`` goes in when a run has chosen a provider, once its arguments are known to be good; with it
``RECOMPUTE``, ``SCALING`` when kernels compute in FP8, and ``LINEAR`` when some layers have linear attention.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cp_plugin.core.problem import Problem
from cp_plugin.megatron import runtime
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.layers import fp8_scaling as scaling
from cp_plugin.megatron.layers import groups, modelopt, spec
from cp_plugin.megatron.models import vocabulary
from cp_plugin.megatron.patches import batch, flops, hybrid, loss, mtp, packing, patching, recompute, rope
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.rules import checks
from cp_plugin.megatron.selfcheck import audit, recheck
from cp_plugin.megatron.selfcheck import first_batch as selfcheck
from cp_plugin.megatron.selfcheck import step_traffic as traffic
from cp_plugin.megatron.startup import agreement, checkpoint, failures, gate


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser that has all of Megatron's."""
    parser = args.add_arguments(parser)
    args.repair_help(parser)
    if cpu.active():
        cpu.set_flag_defaults(parser)
    return parser


@contextmanager
def validation(parsed: argparse.Namespace) -> Iterator[None]:
    """What is done around Megatron's own validation of the flags: checks, and the start of what they ask for."""
    settings = args.settings_from(parsed)
    vocabulary.check(parsed)
    if cpu.active():
        cpu.check_flags(parsed)
        checks.need_provider_on_cpu(parsed, settings)
    if not settings.active:
        start(settings)
        yield
        return
    checks.before(parsed, settings)
    with checks.lift_divisor(parsed, settings):
        yield
    if settings.undecided:
        from cp_plugin.megatron.flags import auto  # with all of the planner, which others do without

        settings = auto.decide(parsed, settings)
        checks.count_tokens(parsed, settings)
    problem = checks.after(parsed, settings, _device())
    if parsed.hybrid_layer_pattern:
        patching.install(HYBRID)
    start(settings, problem)


def _device() -> torch.device:
    """Where this rank will compute. Megatron sets its CUDA device later; asking the first one would start a context of
    every rank there."""
    if cpu.active():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))


def _add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_arguments(original(parser))

    return add_megatron_arguments


def _parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_args(*positional: Any, **named: Any) -> argparse.Namespace:
        args.refuse_yaml(sys.argv[1:])
        return original(*positional, **named)

    return parse_args


def _validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(parsed: argparse.Namespace, *positional: Any, **named: Any) -> argparse.Namespace:
        with validation(parsed):
            return original(parsed, *positional, **named)

    return validate_args


def start(settings: Settings, problem: Problem | None = None) -> None:
    """Make these the settings of the process, and put the provider's patches in place if there is a provider.

    problem: an attention call of the model, by which the provider chooses what the settings leave open.
    """
    runtime.configure(settings, problem)
    if settings.active:
        patching.install(PROVIDER)
        modelopt.register()
        if not settings.recompute_attention:
            patching.install(RECOMPUTE)
        if settings.options.fp8 == "compute":
            patching.install(SCALING)
    if settings.linear is not None:
        patching.install(LINEAR)
    rope.forget_cached_embeddings()


def _initialize_model_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*positional: Any, **named: Any) -> None:
        call = signature.bind(*positional, **named)
        call.apply_defaults()
        failures.watch(60.0 * call.arguments["distributed_timeout_minutes"])
        agreement.require_from_megatron()
        checkpoint.look()
        original(*positional, **named)
        if runtime.settings().active:
            groups.create(runtime.settings(), groups.options_from(call.arguments), runtime.problem())
            checkpoint.note()
            traffic.watch()

    return initialize_model_parallel


def _destroy_model_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def destroy_model_parallel() -> None:
        original()
        runtime.forget_groups()
        rope.forget_cached_embeddings()

    return destroy_model_parallel


def _setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **named: Any) -> Any:
        result = original(*positional, **named)
        chunks = result[0]
        audit.run(chunks)
        if runtime.settings().selfcheck:
            selfcheck.run(chunks)
        recheck.watch(chunks, _iterations)
        return result

    return setup_model_and_optimizer


def _iterations() -> int:
    """How many are done, in Megatron's loop."""
    from megatron.training import get_args

    return getattr(get_args(), "curr_iteration", 0)


COMMAND_LINE = (
    Patch(
        target="megatron.training.arguments:add_megatron_arguments", make=_add_arguments, reason="the plugin's flags"
    ),
    Patch(
        target="megatron.training.arguments:parse_args", make=_parse_args, reason="flags that a YAML file would drop"
    ),
    Patch(target="megatron.training.arguments:validate_args", make=_validate_args, reason="checks of the flags"),
)
"""What a Megatron with a hook for extensions need not be patched for: see ``native``."""

START_UP = (
    *COMMAND_LINE,
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        make=_initialize_model_parallel,
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
        make=_destroy_model_parallel,
        reason="process groups",
    ),
    Patch(
        target="megatron.core.utils:get_batch_on_this_cp_rank",
        make=batch.replace_get_batch,
        reason="layout of the batch",
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
        reason="loss functions that do not count tokens",
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
        make=_setup_model_and_optimizer,
        reason="audit and self-check of the model",
    ),
    Patch(
        target="megatron.training.training:training_log",
        make=traffic.replace_training_log,
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

SCALING = (
    Patch(
        target="megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        make=scaling.replace_finalize_model_grads,
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
    Patch(
        target="megatron.core.transformer.attention:Attention.__init__",
        make=hybrid.replace_attention_init,
        reason="attention of the spec of hybrid models",
    ),
    Patch(target=hybrid.REORDER, make=hybrid.replace_undo, reason="layout of Mamba and gated delta net"),
    Patch(
        target="megatron.core.ssm.mamba_context_parallel:_redo_attention_load_balancing",
        make=hybrid.replace_redo,
        reason="layout of Mamba and gated delta net, on the way back",
    ),
)
