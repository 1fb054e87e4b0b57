"""The plugin's settings in checkpoints: saved with Megatron's arguments, compared when a training run resumes.

Megatron saves its arguments in every checkpoint format. The settings are one more attribute, plain text, so that stock
Megatron can load such checkpoints. Weights do not depend on provider, layout or number of ranks: differences are only
printed. Different layers are a different model, and refused before weights are loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.training import global_vars

from cp_plugin import __version__
from cp_plugin.megatron import runtime
from cp_plugin.megatron.flags import linear_flags, option_flags
from cp_plugin.megatron.flags.args import UPSTREAM
from cp_plugin.megatron.mixers import fp8_scaling as scaling
from cp_plugin.megatron.patches.patching import Call, wraps
from cp_plugin.megatron.state import STATE

ATTRIBUTE = "context_parallel_plugin"  # attribute of the saved arguments: flag -> value, as on a command line
_PROVIDER, _SIZE, _LAYOUT = "--cp-provider", "--context-parallel-size", "--cp-layout"
_ATTENTION, _PATTERN, _LINEAR_PROVIDER = linear_flags.FLAGS


def note() -> None:
    """Add the resolved settings to the arguments that Megatron saves."""
    args = global_vars._GLOBAL_ARGS
    if args is not None and runtime.settings().active:
        setattr(args, ATTRIBUTE, current(args))


def current(args: argparse.Namespace) -> dict[str, str]:
    """The settings of this run."""
    settings = runtime.settings()
    flags = {_SIZE: str(args.context_parallel_size)}
    if not settings.active:
        return {_PROVIDER: UPSTREAM, **flags}
    flags |= {_LAYOUT: runtime.context_parallel().layout.name, "cp_plugin": __version__}
    if settings.softmax:
        cp = runtime.context_parallel(kind="softmax")
        flags = {_PROVIDER: cp.provider.name, **flags, **option_flags.shown(cp.options), **scaling.settings_of(args)}
    if settings.linear is not None:
        linear, cp = settings.linear, runtime.context_parallel(kind="linear")
        flags |= {_ATTENTION: linear.variant, _PATTERN: linear.pattern, _LINEAR_PROVIDER: linear.provider}
        flags = {**option_flags.shown(cp.options), **flags}
    return flags


def saved(args: argparse.Namespace) -> dict[str, str]:
    """The settings of the run that saved these arguments; stock Megatron's if the plugin did not save them."""
    stock = {_PROVIDER: UPSTREAM, _SIZE: str(getattr(args, "context_parallel_size", 1))}
    return getattr(args, ATTRIBUTE, None) or stock


def differences(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    """A sentence for each setting that differs."""
    lines = []
    for name in dict.fromkeys((*now, *then)):
        if now.get(name) != then.get(name):
            running = f"with {name} {now[name]}" if name in now else f"without {name}"
            earlier = f"with {then[name]}" if name in then else "without"
            lines.append(f"resumes {running}; it was saved {earlier}")
    return lines


def other_model(now: Mapping[str, str], then: Mapping[str, str], layers: int) -> str | None:
    """Return why the checkpoint is of another model, or None."""
    if (now.get(_ATTENTION), _kinds(now, layers)) == (then.get(_ATTENTION), _kinds(then, layers)):
        return None
    own, theirs = (_described(flags) for flags in (now, then))
    return (
        f"the checkpoint belongs to another model: it was saved with {theirs}, but this run has {own}. Use the flags "
        "it was saved with, or another --load"
    )


@wraps(
    "megatron.training.checkpointing:_load_base_checkpoint",
    "settings that a checkpoint was saved with",
    "load_dir args rank0 sharded_state_dict",
    otherwise="a checkpoint with other layers would be loaded as if it had these",
)
def replace_load_base_checkpoint(call: Call) -> Any:
    """Wrap Megatron's reading of a checkpoint, which may read its arguments alone first."""
    running, wanted = global_vars._GLOBAL_ARGS, call["sharded_state_dict"]
    if wanted is not None and running is not None and not scaling.same_histories(current(running), STATE.loaded):
        scaling.drop_histories(wanted)
    result = call.original()
    args = (result[0] or {}).get("args")
    if args is not None and running is not None:
        now, STATE.loaded = current(running), saved(args)
        problem = other_model(now, STATE.loaded, running.num_layers)
        if problem is not None:
            raise ValueError(problem)
        for line in () if call["rank0"] else (*differences(now, STATE.loaded), *scaling.started_anew(now, wanted)):
            runtime.print_notice(line)
    return result


def _kinds(settings: Mapping[str, str], layers: int) -> str:
    """A letter per layer."""
    pattern = settings.get(_PATTERN, linear_flags.SOFTMAX)
    return (pattern * layers)[:layers]


def _described(settings: Mapping[str, str]) -> str:
    if _ATTENTION not in settings:
        return "softmax attention in all layers"
    return f"{_ATTENTION} {settings[_ATTENTION]} {_PATTERN} {settings[_PATTERN]}"
