"""The Megatron adapter, and the only part of the plugin that imports Megatron."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cp_plugin.core.versions import require_megatron


def activate(argv: Sequence[str] | None = None) -> None:
    """Add the plugin to Megatron in this process, before anything imports Megatron. Calling it again does nothing.

    Stock Megatron stays what it is until a run chooses a provider with ``--cp-provider``.

    Args:
        argv: the command line of the training, to find ``--cp-device``; default ``sys.argv[1:]``.

    Raises:
        ModuleNotFoundError: without Megatron.
        ValueError: for a megatron-core outside the supported range or with a source the plugin does not know, and for
            an unknown ``--cp-device`` or one that is not there.
    """
    require_megatron()
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.megatron.flags.args import peek

    words = sys.argv[1:] if argv is None else argv
    if cpu.decide(peek(words, "--cp-device") or "auto"):
        cpu.activate()
    from cp_plugin.megatron import native
    from cp_plugin.megatron.patches import patching

    patching.install(native.start_up())


def deactivate() -> None:
    """Undo ``activate`` and everything that was replaced since."""
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.patches import patching

    patching.undo()
    runtime.configure(Settings())
    cpu.deactivate()
