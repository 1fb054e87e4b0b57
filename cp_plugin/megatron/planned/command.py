"""What the planner wants to know of a training command: its model and how it is divided over devices.

The flags go through Megatron's own parser and validation, and the plugin's, as on ``devices`` ranks of a machine with
GPUs: what they refuse is refused here with their message. That happens in a forked process, so nothing it prints,
replaces or puts into the environment is left behind. No GPU is needed, and none is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cp_plugin.core.names import did_you_mean
from cp_plugin.core.versions import require_megatron
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel
from cp_plugin.testing.launch import run_ranks

CAPABILITY = (9, 0)
"""Of the GPU that Megatron's validation is told of: a Hopper, which allows all but what Blackwell adds."""
SECONDS = 300.0
"""For all of it; importing Megatron takes most."""
_FROM_ARGPARSE = 2
"""The status with which argparse exits."""


TE_VERSION = Patch(
    target="megatron.core.utils:is_te_min_version",
    make=lambda original: lambda *_, **__: True,
    reason="a planned machine has every Transformer Engine",
    only_in="megatron.core.transformer.transformer_config",
)


class Planned(NamedTuple):
    """A training command, as the planner sees it."""

    model: Model
    parallel: Parallel
    settings: Settings
    """What the plugin's own flags ask for."""


_BARE = (ArithmeticError, LookupError, AttributeError)
"""What Megatron's own validation ends in for some values, such as a division by a size of 0."""
_WORDS = 3
"""Characters of the shortest message that says something."""


class Refused(NamedTuple):
    """What Megatron or the plugin refuses."""

    message: str


def from_flags(flags: Sequence[str], devices: int) -> tuple[Model, Parallel]:
    """The model and its division over devices.

    Args:
        flags: a command line of Megatron's, without the script; the plugin's flags may be among them.
        devices: of the whole training (WORLD_SIZE).

    Raises:
        ValueError: as ``read`` does.
    """
    planned = read(flags, devices)
    return planned.model, planned.parallel


def read(flags: Sequence[str], devices: int) -> Planned:
    """As ``from_flags``, with what the plugin's flags ask for.

    Raises:
        ValueError: for what Megatron or the plugin refuses, with their message, and for models that the planner does
            not know.
        RankError: if anything else goes wrong.
    """
    if devices < 1:
        raise ValueError(f"{devices} devices: a training needs 1 or more")
    if {"-h", "--help"} & set(flags):
        raise ValueError("--help describes Megatron's flags instead of using them: leave it out")
    (found,) = run_ranks(_read, 1, args=(list(flags),), env={"WORLD_SIZE": str(devices)}, timeout=SECONDS)
    if isinstance(found, Refused):
        raise ValueError(found.message)
    return found


def _read(flags: list[str]) -> Planned | Refused:
    """In the forked process."""
    return with_arguments(flags, lambda args, settings: Planned(*from_args(args, settings), settings))


def with_arguments[T](flags: list[str], use: Callable[[argparse.Namespace, Settings], T]) -> T | Refused:
    """What ``use`` makes of Megatron's arguments after its and our validation, or what was refused; all silent.

    For a forked process: what it prints, replaces and puts into the environment stays.
    """
    out, err = io.StringIO(), io.StringIO()
    options: list[str] = []
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # of loggers that hold on to the stream
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            return use(*_validated(flags, options))
        except SystemExit as left:
            if left.code == _FROM_ARGPARSE:
                text = " ".join(err.getvalue().rpartition("error: ")[2].split())
            else:
                text = out.getvalue().strip().rpartition("\n")[2]
            return Refused(_with_nearest(text or "Megatron exits", options))
        except (AssertionError, ValueError, RuntimeError, TypeError, ImportError, *_BARE) as error:
            said = str(error)
            bare = len(said) < _WORDS or isinstance(error, _BARE)  # says nothing without the line that it comes from
            return Refused(f"{_failed_line(error)}: {said}".rstrip(": ") if bare else said)


def _validated(flags: list[str], options: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Megatron's arguments after its and our validation. ``options`` gets all flags that there are."""
    require_megatron()
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.megatron.flags import args as our_flags
    from cp_plugin.megatron.rules import checks

    our_flags.refuse_yaml(["--cp-provider", *flags])
    patching.undo()
    runtime.configure(Settings())
    sharded = {"--use-torch-fsdp2", "--use-megatron-fsdp"} & set(flags)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if sharded else "1"  # what Megatron demands, for and against
    cpu.activate()
    _pretend_gpu()
    from megatron.training import arguments

    def ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = our_flags.add_arguments(parser)
        our_flags.repair_help(parser)
        options.extend(option for action in parser._actions for option in action.option_strings)
        return parser

    sys.argv = ["pretrain_gpt.py", *flags]
    args = arguments.parse_args(ours)
    settings = our_flags.settings_from(args)
    if not settings.active:
        arguments.validate_args(args, {})
        _check_config(args)
        return args, settings
    checks.before(args, settings)
    with checks.lift_divisor(args, settings):
        arguments.validate_args(args, {})
    checks.after(args, settings, None)
    _check_config(args)
    return args, settings


def _pretend_gpu() -> None:
    """CPU mode answers for CUDA; Megatron also asks how new the GPU is."""
    import torch

    major, minor = CAPABILITY
    torch.cuda.get_device_capability = lambda *_: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: argparse.Namespace(name="GPU", major=major, minor=minor)


def _check_config(args: argparse.Namespace) -> None:
    """Megatron refuses much only where it makes a configuration: as with Transformer Engine, which CPU mode hides."""
    from megatron.training.arguments import core_transformer_config_from_args

    patching.install([TE_VERSION])
    args = copy.copy(args)
    args.apply_rope_fusion = False  # needs a function of Transformer Engine's, not a version
    core_transformer_config_from_args(args)


def _with_nearest(message: str, options: list[str]) -> str:
    """argparse's message on unknown flags, with the nearest ones that there are."""
    if "unrecognized arguments" not in message:
        return message
    unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    return message + "".join(f"; {word}{did_you_mean(word, options)}" for word in unknown)


def _failed_line(error: BaseException) -> str:
    """Of an assertion without a message: the assertion, and the flags in it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    flags = [f"--{name.replace('_', '-')}" for name in dict.fromkeys(re.findall(r"\bargs\.(\w+)", frame.line or ""))]
    about = f"{', '.join(flags)}: " if flags else ""
    return f"{about}Megatron stops at: {frame.line} ({os.path.basename(frame.filename)}:{frame.lineno})"
