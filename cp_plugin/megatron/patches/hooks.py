"""Hooks into Megatron's argument parsing, and installation of the patches that a run needs.

``START_UP`` is always in place: it adds the flags, checks them and compares them between ranks, and does not change a
training. ``PROVIDER`` is installed once the arguments of a run with a provider are valid, with ``RECOMPUTE``,
``PADDING`` for padded sequences, ``SCALING`` for FP8 kernels, ``LINEAR`` for linear attention, and ``DELTA_NET`` for
gated delta net by a provider of ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from cp_plugin.megatron import compat, runtime
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.layers import modelopt, spec
from cp_plugin.megatron.models import vocabulary
from cp_plugin.megatron.patches import patching, rope
from cp_plugin.megatron.patches.patching import Call, Patch, around
from cp_plugin.megatron.patches.table import ALWAYS, DELTA_NET, HYBRID, LINEAR, PADDING, PROVIDER, RECOMPUTE, SCALING
from cp_plugin.megatron.rules import checks
from cp_plugin.megatron.state import Model


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the plugin's flags to a parser that has all of Megatron's."""
    parser = args.add_arguments(parser)
    args.repair_help(parser)
    if cpu.active():
        cpu.set_flag_defaults(parser)
    return parser


@contextmanager
def validation(parsed: argparse.Namespace) -> Iterator[None]:
    """Around Megatron's validation: check the flags before and after, then start what they ask for."""
    settings = args.settings_from(parsed)
    vocabulary.check(parsed)
    if cpu.active():
        cpu.check_flags(parsed)
        checks.need_provider_on_cpu(parsed, settings)
    if not settings.active:
        start(settings)
        yield
        if cpu.active() and parsed.hybrid_layer_pattern:
            patching.install([HYBRID_MODEL])
        return
    checks.before(parsed, settings)
    with checks.lift_divisor(parsed, settings):
        yield
    if settings.undecided:
        from cp_plugin.megatron.planned import auto  # imports the whole planner

        settings = auto.decide(parsed, settings, may_leave=True)
        if not settings.active:
            start(settings)
            return
        checks.count_tokens(parsed, settings)
    model = checks.after(parsed, settings, _device())
    if parsed.hybrid_layer_pattern:
        patching.install([*HYBRID, HYBRID_MODEL])
    start(settings, model)


def _device() -> torch.device:
    """This rank's device, which Megatron sets later; querying device 0 would create a context there on every rank."""
    if cpu.active():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count()))


@around
def _add_arguments(call: Call) -> argparse.ArgumentParser:
    return add_arguments(call.original())


@around
def _parse_args(call: Call) -> argparse.Namespace:
    args.refuse_yaml(sys.argv[1:])
    return call.original()


@around
def _validate_args(call: Call) -> argparse.Namespace:
    with validation(call["args"]):
        return call.original()


def start(settings: Settings, model: Model | None = None) -> None:
    """Make these the settings of the process, and install the patches they need.

    model: the resolved attention; None: no flags described one.
    """
    runtime.configure(settings, model)
    patches: list[patching.Patch] = []
    if settings.active:
        patches += PROVIDER
        if not settings.recompute_attention:
            patches += RECOMPUTE
        if settings.pad_sequence:
            patches += PADDING
        if settings.options.fp8 == "compute":
            patches += SCALING
    if settings.linear is not None:
        patches += LINEAR
    if settings.delta_net is not None:
        patches += DELTA_NET
    patching.install(patches)  # at once: each call scans all modules
    if settings.active:
        modelopt.register()
    rope.forget_cached_embeddings()


@around
def replace_model_init(call: Call) -> None:
    """Give ``HybridModel`` the plugin's core attention, and on the CPU a spec without Transformer Engine."""
    stack = call["hybrid_stack_spec"]
    if cpu.active():
        from cp_plugin.megatron.models import hybrid  # imports much of Megatron

        stack = hybrid.on_cpu(stack, call["config"])
    call.original(hybrid_stack_spec=spec.with_core_attention(stack) if runtime.settings().active else stack)


HYBRID_MODEL = Patch(
    "megatron.core.models.hybrid.hybrid_model:HybridModel.__init__",
    replace_model_init,
    "attention of the spec of hybrid models, which on the CPU is not that of Transformer Engine",
    versions=compat.has_hybrid_models,
)

COMMAND_LINE = (
    Patch("megatron.training.arguments:add_megatron_arguments", _add_arguments, "the plugin's flags"),
    Patch("megatron.training.arguments:parse_args", _parse_args, "flags that a YAML file would drop"),
    Patch("megatron.training.arguments:validate_args", _validate_args, "checks of the flags"),
)
"""Not needed where Megatron has a hook for extensions: see ``native``."""

START_UP = (*COMMAND_LINE, *ALWAYS)
