"""A training command as the planner sees it: model and parallel sizes.

The flags go through Megatron's and the plugin's parsers and validation as on ``devices`` GPU ranks; their refusals are
passed on. This happens in a forked process, which leaves no output, patches or environment behind. No GPU is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import sys
from collections.abc import Callable, Sequence

import torch

from cp_plugin.engine.common import refusals
from cp_plugin.engine.common.versions import require_megatron
from cp_plugin.megatron.flags import early
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.planned import sizes
from cp_plugin.planner.candidates import Allowed
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel
from cp_plugin.testing.launch import run_ranks

CAPABILITY = (9, 0)
"""Compute capability that Megatron's validation sees: Hopper, which supports all but Blackwell's additions."""
SECONDS = 300.0  # timeout; importing Megatron takes most


def question(flags: Sequence[str], devices: int) -> tuple[Model, Parallel, Allowed]:
    """Return what to ask the planner about a training run.

    Args:
        flags: Megatron's and the plugin's command line without the script.
        devices: WORLD_SIZE of the training.

    Raises:
        ValueError: with the message of a refusal by Megatron or the plugin, and for models that the planner does not
            know.
        RankError: for any other error.
    """
    if devices < 1:
        raise ValueError(f"--devices {devices}: training needs at least 1")
    if {"-h", "--help"} & set(flags):
        raise ValueError(
            "--help after -- would only print Megatron's flags: leave it out (cp-plugin plan -h lists plan's own)"
        )
    arguments, environment = (list(flags), sizes.question), {"WORLD_SIZE": str(devices)}
    (answer,) = run_ranks(with_arguments, 1, args=arguments, env=environment, timeout=SECONDS)
    if isinstance(answer, ValueError):
        raise answer
    return answer[:3]


def with_arguments[T](flags: list[str], use: Callable[[argparse.Namespace, Settings], T]) -> T | ValueError:
    """The result of ``use`` for the validated arguments, or the refusal; call it in a forked process."""
    out = io.StringIO()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # for loggers that hold the stream
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            return use(*_validated(flags))
        except SystemExit:
            return ValueError(out.getvalue().strip().rpartition("\n")[2] or "Megatron exits")
        except Exception as error:
            return ValueError(refusals.message_of(error) or early.reason(error))


def _validated(flags: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Arguments and settings after Megatron's and the plugin's validation."""
    require_megatron()
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.megatron.flags import args as our_flags
    from cp_plugin.megatron.rules import checks

    our_flags.refuse_yaml(["--cp-provider", *flags])
    patching.undo()
    runtime.configure(Settings())
    sharded = {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(flags)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if sharded else "1"  # Megatron requires either
    cpu.activate()
    torch.cuda.get_device_capability = lambda *_: CAPABILITY  # CPU mode answers the rest
    major, minor = CAPABILITY
    torch.cuda.get_device_properties = lambda *_: argparse.Namespace(name="GPU", major=major, minor=minor)
    from megatron.training import arguments

    def ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = our_flags.add_arguments(parser)
        our_flags.repair_help(parser)
        early.shorten_errors(parser)
        return parser

    sys.argv = ["pretrain_gpt.py", *flags]
    args = arguments.parse_args(ours)
    settings = our_flags.settings_from(args)
    if settings.active:
        checks.check_parsed(args, settings)
        with checks.lift_divisor(args, settings):
            _validate(args)
        checks.check_validated(args, settings, None)
    else:
        _validate(args)
    _check_config(args)
    return args, settings


def _validate(args: argparse.Namespace) -> None:
    """Megatron's validation; where it only names the number of data-parallel ranks, say where that comes from."""
    from megatron.training import arguments

    try:
        arguments.validate_args(args, {})
    except AssertionError as error:
        if "data_parallel_size" not in str(error):
            raise
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        divided = ", ".join(f"--{name.replace('_', '-')} {getattr(args, name)}" for name in sizes)
        raise ValueError(
            f"--global-batch-size {args.global_batch_size}: {args.world_size} devices with {divided} are "
            f"{args.data_parallel_size} data-parallel ranks, and each needs as many micro-batches: use a multiple of "
            f"{args.data_parallel_size * args.micro_batch_size}, or raise one of these sizes"
        ) from error


def _check_config(args: argparse.Namespace) -> None:
    """Build a TransformerConfig, whose checks refuse more; as if Transformer Engine were installed."""
    from megatron.core.transformer import transformer_config
    from megatron.training.arguments import core_transformer_config_from_args

    args = copy.copy(args)
    args.apply_rope_fusion = False  # needs a function of Transformer Engine's, not a version
    with patching.lent(transformer_config, is_te_min_version=lambda *_, **__: True):
        core_transformer_config_from_args(args)
