"""Native hook: the plugin as an extension of a Megatron patched with ``patches/megatron-lm``.

Megatron loads this module by the entry point group ``megatron.training.plugins`` and calls its two functions instead of
being wrapped around parser and validation, so that any training script knows the flags without ``cp_plugin.run``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cp_plugin.engine.common import refusals
from cp_plugin.megatron import compat
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args, early
from cp_plugin.megatron.patches import hooks, patching
from cp_plugin.megatron.patches.patching import Patch


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Called by Megatron with its parser.

    Raises:
        ValueError: for a missing ``--cp-device``, and as ``flags.early.check``.
    """
    refusals.print_uncaught()
    words = sys.argv[1:]
    early.check(words)
    if cpu.decide(args.peek(words, "--cp-device") or "auto"):
        cpu.activate()
    return hooks.add_arguments(parser)


@contextmanager
def validation(parsed: argparse.Namespace) -> Iterator[None]:
    """Called by Megatron around its own validation.

    Raises:
        ValueError: for an unknown megatron-core and unsupported flags.
    """
    if args.settings_from(parsed).active:
        patching.install(start_up())
    with refusals.output_held(), hooks.validation(parsed):
        yield


def start_up() -> Sequence[Patch]:
    """The patches to install before a provider is chosen."""
    asked_for = sys.modules[__name__] in compat.extensions()
    return [patch for patch in hooks.START_UP if not (asked_for and patch in hooks.COMMAND_LINE)]
