"""Where the plugin enters Megatron: every symbol it replaces, by what, and why.

``START_UP`` is always in place: it adds the flags, checks them, and compares them between ranks, and changes nothing of
a training. ``PROVIDER`` goes in when a run has chosen a provider, once its arguments are known to be good; ``LINEAR``
with it when some layers have linear attention.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from cp_plugin.megatron import (
    agreement,
    args,
    audit,
    batch,
    checks,
    cpu,
    flops,
    gate,
    groups,
    patching,
    rope,
    runtime,
    selfcheck,
    spec,
    traffic,
)
from cp_plugin.megatron.args import Settings
from cp_plugin.megatron.patching import Patch
from cp_plugin.problem import Problem


def _add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = args.add_arguments(original(parser))
        args.repair_help(parser)
        if cpu.active():
            cpu.set_flag_defaults(parser)
        return parser

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
        settings = args.settings_from(parsed)
        if cpu.active():
            cpu.check_flags(parsed)
            checks.need_provider_on_cpu(parsed, settings)
        if not settings.active:
            start(settings)
            return original(parsed, *positional, **named)
        checks.before(parsed, settings)
        with checks.lift_divisor(parsed, settings):
            result = original(parsed, *positional, **named)
        problem = checks.after(parsed, settings, torch.device("cpu" if cpu.active() else "cuda"))
        start(settings, problem)
        return result

    return validate_args


def start(settings: Settings, problem: Problem | None = None) -> None:
    """Make these the settings of the process, and put the provider's patches in place if there is a provider.

    problem: an attention call of the model, by which the provider chooses what the settings leave open.
    """
    runtime.configure(settings, problem)
    if settings.active:
        patching.install(PROVIDER)
    if settings.linear is not None:
        patching.install(LINEAR)
    rope.forget_cached_embeddings()


def _initialize_model_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*positional: Any, **named: Any) -> None:
        call = signature.bind(*positional, **named)
        call.apply_defaults()
        agreement.require_from_megatron()
        original(*positional, **named)
        if runtime.settings().active:
            groups.create(runtime.settings(), groups.options_from(call.arguments), runtime.problem())

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
        runtime.built(chunks)
        return result

    return setup_model_and_optimizer


START_UP = (
    Patch(
        target="megatron.training.arguments:add_megatron_arguments", make=_add_arguments, reason="the plugin's flags"
    ),
    Patch(
        target="megatron.training.arguments:parse_args", make=_parse_args, reason="flags that a YAML file would drop"
    ),
    Patch(target="megatron.training.arguments:validate_args", make=_validate_args, reason="checks of the flags"),
    Patch(
        target="megatron.core.parallel_state:initialize_model_parallel",
        make=_initialize_model_parallel,
        reason="comparison of the ranks' flags, and process groups",
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
