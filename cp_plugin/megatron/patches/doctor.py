"""Which functions of a Megatron a run would replace, and whether each is as the plugin needs it; starts nothing.

``cp-plugin doctor --megatron`` prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def examined(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """Import Megatron from a checkout and examine the patches of a run: ``version``, and ``symbols`` as of ``_row``.

    words: flags of the run; none: a GPT model with a provider, and what any other run would replace.

    Raises:
        ValueError: if there is no ``megatron`` package, it is outside of the supported range, or flags are wrong.
    """
    root = Path(folder).resolve()
    if not (root / "megatron" / "core").is_dir():
        raise ValueError(
            f"--megatron {folder}: no megatron/core in it; give a Megatron-LM checkout or an unpacked wheel"
        )
    sys.path.insert(0, str(root))
    from cp_plugin.engine.common.versions import require_megatron
    from cp_plugin.megatron.flags.args import Settings, peek

    require_megatron()
    from cp_plugin.megatron.cpu import mode as cpu

    if cpu.decide(peek(words, "--cp-device") or "auto"):
        cpu.activate()
    from cp_plugin.megatron import compat
    from cp_plugin.megatron.patches import patching
    from cp_plugin.megatron.patches.hooks import OF_RUN, START_UP
    from cp_plugin.megatron.patches.patching import Run

    patching.check_version()
    run = _run(words) if words else Run(settings=Settings(provider="ring"), args=argparse.Namespace())
    process = [*START_UP, *(cpu.PATCHES if cpu.active() else ())]
    rows = [_row(patch, needed=True) for patch in process]
    rows += [_row(patch, needed=needed) for patch in OF_RUN if (needed := patch.when(run)) or not words]
    return {"version": compat.megatron_version(), "symbols": rows}


def _run(words: Sequence[str]) -> Any:
    """The run that these flags describe, without Megatron's validation."""
    from megatron.training import arguments

    from cp_plugin.megatron.flags import args
    from cp_plugin.megatron.patches.patching import Run, lent

    with lent(sys, argv=["doctor", *words]):
        parsed: argparse.Namespace = arguments.parse_args(args.add_arguments)
    return Run(settings=args.settings_from(parsed), args=parsed)


def _row(patch: Any, *, needed: bool) -> dict[str, Any]:
    """One symbol; its state: checked, absent, or broken."""
    from cp_plugin.megatron.patches import patching

    if patching.replaced_at(patch.target) is not None:
        state, broken = "checked", ""  # CPU mode's, in place by now
    else:
        finding = patching.examine(patch)
        state, broken = finding.state, finding.broken or ""
        if broken and finding.original is not None:
            broken = patching.refusal([finding])
    row: dict[str, Any] = {"symbol": patch.target, "contract": patch.form, "state": state}
    row |= {"for": patch.reason, "otherwise": patch.otherwise}
    return row | {"needed": needed, "broken": broken}
