"""The Megatron adapter; only this package imports Megatron."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cp_plugin.engine.common.versions import require_megatron


def activate(argv: Sequence[str] | None = None) -> None:
    """Add the plugin to Megatron in this process, before anything imports Megatron; idempotent.

    Megatron's behaviour does not change until a run chooses a provider with ``--cp-provider``.

    Args:
        argv: the training's command line, searched for ``--cp-device``; default ``sys.argv[1:]``.

    Raises:
        ModuleNotFoundError: without Megatron.
        ValueError: for a megatron-core outside the supported range, or that breaks a contract of the patches, and for
            an unknown or missing ``--cp-device``.
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
    """Undo ``activate`` and all patches since."""
    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.cpu import mode as cpu
    from cp_plugin.megatron.flags.args import Settings
    from cp_plugin.megatron.patches import patching

    patching.undo()
    runtime.configure(Settings())
    cpu.deactivate()
