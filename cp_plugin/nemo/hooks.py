"""Hooks into Bridge: the two functions that are replaced, and what runs when.

    apply               prepare: check and adjust the config, replace Megatron's functions (megatron.patches.hooks)
    Bridge's setup      prepare again, since the config may have changed; then audit and self-check of the built model
    Bridge's rebinding  process groups for the evaluation's context-parallel groups, made on first use

Batches need no patch of Bridge: its ``get_batch`` calls Megatron's function, for packs to slice the token indices.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from cp_plugin import megatron
from cp_plugin.megatron import groups, runtime
from cp_plugin.megatron.cpu import mode as megatrons_cpu
from cp_plugin.megatron.flags import args
from cp_plugin.megatron.flags.args import UPSTREAM, Settings
from cp_plugin.megatron.mixers.spec import with_core_attention
from cp_plugin.megatron.patches import hooks as megatrons
from cp_plugin.megatron.patches import patching, rope
from cp_plugin.megatron.patches.patching import Call, wraps
from cp_plugin.megatron.rules import checks
from cp_plugin.megatron.selfcheck import audit, recheck, step
from cp_plugin.megatron.state import STATE
from cp_plugin.nemo import arguments, cpu, refusals


def prepare(config: Any, ours: Mapping[str, Any], planned: tuple[str, ...] = ()) -> Settings:
    """Check and adjust a config, and install the plugin if it asks for a provider.

    Args:
        config: a ``ConfigContainer``.
        ours: the plugin's flags -> value.
        planned: the planner's notes, if it chose these flags.

    Raises:
        ValueError: for what is not supported.
    """
    megatron.activate([])
    if megatrons_cpu.active():
        cpu.prepare(config)
    if ours["cp_provider"] != UPSTREAM:
        linear = ours["cp_linear_attention"]
        argument, instead = f'provider="{ours["cp_provider"]}"', 'use provider="upstream"'
        if linear is not None:
            argument, instead = f'linear_attention="{linear}"', "leave it out"
        refusals.check(config, argument, instead)
    with _config_messages(config):
        namespace = arguments.namespace(config, ours)
        settings = replace(args.settings_from(namespace), planned=planned)
        if megatrons_cpu.active():
            checks.need_provider_on_cpu(namespace, settings)
        if not settings.active:
            return settings
        checks.check_parsed(namespace, settings)
        if refusals.fine_tunes(config) and not namespace.calculate_per_token_loss:
            namespace.calculate_per_token_loss = True  # as Bridge requires, since all of a rank's tokens may be masked
            if namespace.rank == 0:
                print("cp_plugin: setting --calculate-per-token-loss: Bridge requires it for fine-tuning")
        if settings.undecided:
            from cp_plugin.megatron.planned import auto  # imports the whole planner

            settings = auto.decide(namespace, settings)
            ours = {name: getattr(namespace, name) for name in arguments.own()}
            checks.count_tokens(namespace, settings)
        model = checks.check_validated(namespace, settings, torch.device("cpu" if megatrons_cpu.active() else "cuda"))
        arguments.write_back(namespace, config)
    megatrons.start(settings, model, namespace)
    config.model.transformer_layer_spec = with_core_attention(config.model.transformer_layer_spec)
    STATE.compared = namespace
    patching.install(BRIDGE)
    STATE.bridge_flags = dict(ours)
    STATE.bridge_timeout_minutes = config.dist.distributed_timeout_minutes
    return settings


@contextlib.contextmanager
def _config_messages(config: Any) -> Iterator[None]:
    """Make messages and errors name the config's fields instead of Megatron's flags."""
    said = io.StringIO()
    try:
        with _errors_in_config_terms(config), contextlib.redirect_stdout(said):
            yield
    finally:
        if said.getvalue():
            print(arguments.rename_for_config(said.getvalue(), config), end="", flush=True)


@contextlib.contextmanager
def _errors_in_config_terms(config: Any) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(arguments.rename_for_config(str(error), config)) from None


@wraps("megatron.bridge.training.setup:setup", "audit and self-check of the model", "state", package="megatron-bridge")
def _setup(call: Call) -> Any:
    if STATE.bridge_flags is None:
        return call.original()
    state = call["state"]
    config = state.cfg
    before = _adjustable(config)
    settings = prepare(config, STATE.bridge_flags, runtime.settings().planned)
    if _adjustable(config) != before:
        raise ValueError(
            "the config was changed after cp_plugin.nemo.apply to values that the provider does not support "
            f"({before} must be {_adjustable(config)}): call apply once the config is complete"
        )
    with _errors_in_config_terms(config):
        result = call.original()
        audit.run(result.model)
        if settings.selfcheck:
            step.expect(result.optimizer, result.scheduler)
        recheck.watch(result.model, lambda: state.train_state.step)
    return result


def _adjustable(config: Any) -> dict[str, Any]:
    """The fields that ``prepare`` may change."""
    return {
        "config.model.calculate_per_token_loss": config.model.calculate_per_token_loss,
        "config.model.apply_rope_fusion": config.model.apply_rope_fusion,
        "config.dataset.skip_getting_attention_mask_from_dataset": getattr(
            config.dataset, "skip_getting_attention_mask_from_dataset", True
        ),
    }


@wraps(
    "megatron.bridge.training.eval_context_parallel_rebinding:install_pg_collection",
    "process groups of an evaluation",
    "target",
    package="megatron-bridge",
)
def _install_pg_collection(call: Call) -> None:
    """Make the plugin's groups when an evaluation first uses other context-parallel groups."""
    target = call["target"]
    if runtime.settings().active and not runtime.has_groups(target.cp):
        options = groups.GroupOptions(timeout=timedelta(minutes=STATE.bridge_timeout_minutes))
        groups.create(runtime.settings(), options, runtime.model(), target.cp)
    call.original()
    rope.forget_cached_embeddings()


BRIDGE = (_setup, _install_pg_collection)
