"""Scaled runs: a few real steps of Megatron with narrow layers on CPU ranks, compared with CP 1.

Provider, layout, layer pattern, tensor and pipeline parallelism are the example's; grids, rings and the head axis are
in proportion to the ranks. Every changed flag is listed with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from cp_plugin.cli.examples.command import AXES, CONTEXT, Command, resized, words
from cp_plugin.cli.examples.config import Value, changed
from cp_plugin.cli.examples.sizes import MOST, refusal
from cp_plugin.cli.examples.training import (
    TOLERANCE,
    Iteration,
    corpus,
    difference,
    disagreements,
    largest,
    print_losses,
    train,
    verdict,
)
from cp_plugin.cli.terminal import print_flags, print_table

FIRST_STEP = 1e-6
"""Largest relative difference of the first loss, before any update of the weights."""
HALF = 2e-4
"""Largest relative difference of a loss of a bfloat16 model, whose payloads may be FP8 (docs/fp8.md)."""

NARROW = "narrow layers, or only a few steps"
SHAPE = "fewer ranks in the same shape"
_PRECISION = ("bf16", "fp16")
_KEPT_ALONE = ("cp-linear-attention", "cp-layer-pattern")
"""The ``cp-...`` flags that the run with CP 1 keeps."""
_FP8 = "FP8 matrices need Transformer Engine, on CUDA"
_SHARDED = "shards parameters, not attention, and needs NCCL"
_OFFLOADED = "everything runs on the CPU here"
_LEFT_OUT: Mapping[str, str] = {
    "use-megatron-fsdp": _SHARDED,
    "use-torch-fsdp2": _SHARDED,
    "data-parallel-sharding-strategy": "of --use-megatron-fsdp",
    "optimizer-cpu-offload": _OFFLOADED,
    "optimizer-offload-fraction": _OFFLOADED,
    "overlap-cpu-optimizer-d2h-h2d": _OFFLOADED,
    "use-precision-aware-optimizer": "needs Transformer Engine, on CUDA",
    "ckpt-format": "nothing is saved",
    "save-interval": "nothing is saved",
}
"""Flags omitted on the CPU, with reasons."""
_ADDED: Mapping[str, tuple[Value, str]] = {
    "calculate-per-token-loss": (True, "losses are then summed in the same way with and without context parallelism"),
    "disable-gloo-process-groups": (True, "all groups already use Gloo here"),
    "num-workers": (0, "no extra processes"),
}
"""Flags added on the CPU, with reasons."""
_SHAPES = (CONTEXT, "cp-grid", "cp-intra-size", "cp-head-parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The two trainings to compare."""

    command: Command
    """As published."""
    many: Command
    """With narrow layers on few ranks."""
    one: Command
    """The same with CP 1."""
    changed: Mapping[str, tuple[Value, Value, str]]
    """Flag -> (full value, value here, reason)."""
    tolerance: float
    first: float


def scaled(command: Command, ranks: int) -> Scaled:
    """The trainings on this many ranks; ValueError if the example cannot be divided over them."""
    if ranks > MOST:
        raise ValueError(f"--ranks {ranks}: give at most {MOST:,} ranks")
    length = command.experiment.scaled_length
    lengths: dict[str, Value] = {"seq-length": length, "max-position-embeddings": length}
    narrow, reasons = _on_cpu(changed(command.values, {**command.experiment.scaled, **lengths}))
    small = replace(command, nodes=1, per_node=ranks, values=narrow)
    tensor, pipeline = (small.size(axis) for axis in AXES)
    alone = tensor * pipeline
    context, rest = divmod(ranks, alone)
    if rest or context < 2:
        raise ValueError(
            f"--ranks {ranks}: use a multiple of {tensor * pipeline}, and at least {2 * tensor * pipeline}: tensor "
            f"{tensor} x pipeline {pipeline} x at least 2 context-parallel ranks"
        )
    many = replace(small, values=resized(narrow, context))
    reason = refusal(many)
    if reason is not None:
        raise ValueError(f"--ranks {ranks}: {reason}")
    half = _in_half(narrow)
    return Scaled(
        command=command,
        many=many,
        one=replace(small, per_node=alone, values=_without_context(narrow)),
        changed=_changed(command.values, many.values, reasons),
        tolerance=HALF if half else TOLERANCE,
        first=HALF if half else FIRST_STEP,
    )


def _on_cpu(flags: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, str]]:
    """The flags on the CPU, and flag -> reason for those that differ."""
    half = _in_half(flags)
    reasons = {flag: _FP8 for flag in flags if flag.startswith("fp8-")}
    reasons |= {flag: why for flag, why in _LEFT_OUT.items() if flag in flags}
    if not half:
        reasons |= {f: "float32, in which equal gradients give equal losses" for f in _PRECISION if f in flags}
    if flags.get("cp-backend") not in (None, "auto", "sdpa", "reference"):
        reasons["cp-backend"] = "that kernel runs on CUDA only"
    found = {flag: value for flag, value in flags.items() if flag not in reasons}
    if flags.get("cp-fp8") == "compute":
        found["cp-backend"] = "float8"
        reasons["cp-backend"] = (
            "the numerics of FP8 attention on any device; the real kernel needs Transformer Engine and Hopper"
        )
    for flag, (value, why) in _ADDED.items():
        reasons[flag] = why
        found.setdefault(flag, value)
    return found, reasons


def _in_half(flags: Mapping[str, Value]) -> bool:
    """Whether some flags have no meaning in float32."""
    return bool(flags.get("cp-fp8")) or flags.get("cp-gradient-dtype") == "model"


def _without_context(flags: Mapping[str, Value]) -> dict[str, Value]:
    kept = _KEPT_ALONE if "cp-linear-attention" in flags else ()
    return {f: v for f, v in flags.items() if f in kept or not (f == CONTEXT or f.startswith("cp-"))}


def _changed(
    full: Mapping[str, Value], here: Mapping[str, Value], reasons: Mapping[str, str]
) -> dict[str, tuple[Value, Value, str]]:
    return {
        flag: (full.get(flag), here.get(flag), SHAPE if flag in _SHAPES else reasons.get(flag, NARROW))
        for flag in dict.fromkeys([*full, *here])
        if words(flag, full.get(flag)) != words(flag, here.get(flag))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    of: Scaled
    one: Sequence[Iteration]
    many: Sequence[Iteration]
    problems: Sequence[str]


def run(of: Scaled, steps: int, out: Path, *, quiet: bool = False) -> Trained:
    """Train with context parallelism first, where mistakes in the flags show, then without."""
    experiment = of.command.experiment
    folder = out / experiment.name / experiment.variant.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    data = corpus(out / "stdlib", quiet=quiet)
    data += ["--data-cache-path", str(folder / "cache"), "--eval-interval", "1000000"]
    log = folder / f"ranks{of.many.devices}.log"
    many = train([*of.many.flags, *data], of.many.devices, steps, log, quiet=quiet)
    one = train([*of.one.flags, *data], of.one.devices, steps, folder / "cp1.log", quiet=quiet)
    problems = disagreements(one, many, steps, of.tolerance)
    if one and many and not difference(one[0], many[0]) <= of.first:
        problems.append(f"the first losses differ by {difference(one[0], many[0]):.1e}, allowed {of.first:.0e}")
    return Trained(of=of, one=one, many=many, problems=problems)


def as_json(found: Trained) -> dict[str, Any]:
    of = found.of
    return {
        "example": of.command.experiment.name,
        "variant": of.command.experiment.variant,
        "ranks": of.many.devices,
        "context": of.many.size(CONTEXT),
        "flags": of.many.flags,
        "changed": {flag: {"full": before, "here": now, "why": why} for flag, (before, now, why) in of.changed.items()},
        "losses": [i.loss for i in found.many],
        "losses_cp1": [i.loss for i in found.one],
        "tolerance": of.tolerance,
        "first_step": of.first,
        "problems": list(found.problems),
        "ok": not found.problems,
    }


def print_changes(console: Console, of: Scaled) -> None:
    """The changed flags with reasons, then the parallel flags that are kept."""
    experiment = of.command.experiment
    rows = [((f"--{flag}", _shown(full), _shown(here), why), "") for flag, (full, here, why) in of.changed.items()]
    title = (
        f"{experiment.config.title}, variant {experiment.variant}, on {of.many.devices} CPU ranks: what differs from "
        "the published one"
    )
    print_table(console, title, ("flag", "full", "here", "why"), rows)
    kept = [
        " ".join(words(flag, value))
        for flag, value in of.many.values.items()
        if flag not in of.changed and ("parallel" in flag or flag.startswith("cp-"))
    ]
    print_flags(console, "kept:", " ".join(kept), style="")
    console.print()


def print_run(console: Console, found: Trained) -> None:
    of, experiment = found.of, found.of.command.experiment
    print_losses(console, found.one, found.many, ("CP 1", f"CP {of.many.size(CONTEXT)}"))
    passed = (
        f"{experiment.name} ({experiment.variant}) on {of.many.devices} ranks equals CP 1: {len(found.one)} "
        f"losses within {largest(found.one, found.many):.1e} (allowed {of.tolerance:.0e}), the first within "
        f"{largest(found.one[:1], found.many[:1]):.1e} ({of.first:.0e})"
    )
    verdict(console, found.problems, passed)


def _shown(value: Value) -> str:
    if value is True:
        return "on"
    return " ".join(words("", value)[1:])
