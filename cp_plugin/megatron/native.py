"""The plugin as an extension of a Megatron that asks for such: ``patches/megatron-lm`` has the few lines it needs.

Megatron finds this module by the entry point group ``megatron.training.plugins`` and calls its two functions. They are
what is otherwise wrapped around Megatron's parser and validation, so that any training script knows the flags without
``cp_plugin.run``. Nothing of Megatron is replaced in a run that does not ask for the plugin.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cp_plugin.megatron import compat
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags import args
from cp_plugin.megatron.patches import hooks, patching
from cp_plugin.megatron.patches.patching import Patch


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Called by Megatron with a parser that has its own flags.

    Raises:
        ValueError: for an unknown ``--cp-device`` or one that is not there, and flags that a YAML file would drop.
    """
    words = sys.argv[1:]
    args.refuse_yaml(words)
    if cpu.decide(args.peek(words, "--cp-device") or "auto"):
        cpu.activate()
    return hooks.add_arguments(parser)


@contextmanager
def validation(parsed: argparse.Namespace) -> Iterator[None]:
    """Called by Megatron: its own validation of the arguments happens inside.

    Raises:
        ValueError: for a megatron-core that the plugin does not know, and flags that it does not support.
    """
    if args.settings_from(parsed).active:
        patching.install(start_up())
    with hooks.validation(parsed):
        yield


def start_up() -> Sequence[Patch]:
    """What is to be replaced in this Megatron before a provider is chosen."""
    asked_for = sys.modules[__name__] in compat.extensions()
    return [patch for patch in hooks.START_UP if not (asked_for and patch in hooks.COMMAND_LINE)]
