"""The same parallel shape with narrow layers: a few real steps of Megatron on CPU ranks, against CP 1.

Provider, layout, grid, rings, head axis, layer pattern, tensor and pipeline parallelism are the example's, the sizes of
grids and rings in proportion to the ranks. What is changed is listed, each flag with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cp_plugin.cli.examples.command import AXES, CONTEXT, Command, words
from cp_plugin.cli.examples.config import Value, changed
from cp_plugin.cli.examples.shapes import resized
from cp_plugin.cli.examples.sizes import MOST, refusal
from cp_plugin.cli.examples.training import TOLERANCE

FIRST_STEP = 1e-6
"""Largest relative difference of the first loss, where the weights are still the same."""
HALF = 2e-4
"""Largest relative difference of a loss for a bfloat16 model, whose payloads may travel in FP8 (docs/fp8.md)."""

NARROW = "narrow layers, or a training of a few steps"
SHAPE = "fewer ranks of the same shape"
_PRECISION = ("bf16", "fp16")
_KEPT_ALONE = ("cp-linear-attention", "cp-layer-pattern")
"""The ``cp-...`` flags that a run with one context-parallel rank has, too."""
_FP8 = "matrices in FP8 are Transformer Engine's, on CUDA"
_SHARDED = "divides parameters, not attention, over ranks by means of NCCL"
_OFFLOADED = "everything is on the CPU here"
_LEFT_OUT: Mapping[str, str] = {
    "use-megatron-fsdp": _SHARDED,
    "use-torch-fsdp2": _SHARDED,
    "data-parallel-sharding-strategy": "of --use-megatron-fsdp",
    "optimizer-cpu-offload": _OFFLOADED,
    "optimizer-offload-fraction": _OFFLOADED,
    "overlap-cpu-optimizer-d2h-h2d": _OFFLOADED,
    "use-precision-aware-optimizer": "is Transformer Engine's, on CUDA",
    "ckpt-format": "nothing is saved",
    "save-interval": "nothing is saved",
}
"""Flags that are left out on the CPU, and why."""
_ADDED: Mapping[str, tuple[Value, str]] = {
    "calculate-per-token-loss": (True, "losses are summed alike with and without context parallelism"),
    "disable-gloo-process-groups": (True, "all groups are Gloo's here already"),
    "num-workers": (0, "no further processes"),
}
"""Flags for the CPU, and why."""
_SHAPES = (CONTEXT, "cp-grid", "cp-intra-size", "cp-head-parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The two trainings to compare."""

    command: Command
    """The published one."""
    many: Command
    """The narrow one, on few ranks."""
    one: Command
    """The narrow one with CP 1, and the same tensor and pipeline parallelism."""
    changed: Mapping[str, tuple[Value, Value, str]]
    """Flag -> its value in the full command, its value here, and why."""
    tolerance: float
    first: float


def scaled(command: Command, ranks: int) -> Scaled:
    """The trainings on this many ranks.

    Raises:
        ValueError: for a number of ranks over which the example cannot be divided.
    """
    if ranks > MOST:
        raise ValueError(f"--scaled {ranks}: give at most {MOST:,} ranks")
    length = command.experiment.scaled_length
    lengths: dict[str, Value] = {"seq-length": length, "max-position-embeddings": length}
    narrow, reasons = _on_cpu(changed(command.values, {**command.experiment.scaled, **lengths}))
    small = replace(command, nodes=1, per_node=ranks, values=narrow)
    tensor, pipeline = (small.size(axis) for axis in AXES)
    alone = tensor * pipeline
    context, rest = divmod(ranks, alone)
    if rest or context < 2:
        raise ValueError(
            f"--scaled {ranks}: use a multiple of {tensor * pipeline}, and at least {2 * tensor * pipeline}: tensor "
            f"{tensor} x pipeline {pipeline} x at least 2 context-parallel ranks"
        )
    many = replace(small, values=resized(narrow, context))
    reason = refusal(many)
    if reason is not None:
        raise ValueError(f"--scaled {ranks}: {reason}")
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
    """The flags on the CPU, and the reasons for those that differ."""
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
            "the numerics of FP8 attention on any device; the kernel is Transformer Engine's, on Hopper"
        )
    for flag, (value, why) in _ADDED.items():
        reasons[flag] = why
        found.setdefault(flag, value)
    return found, reasons


def _in_half(flags: Mapping[str, Value]) -> bool:
    """Whether there are flags that mean nothing in float32."""
    return bool(flags.get("cp-fp8")) or flags.get("cp-gradient-dtype") == "model"


def _without_context(flags: Mapping[str, Value]) -> dict[str, Value]:
    """The flags without context parallelism."""
    kept = _KEPT_ALONE if "cp-linear-attention" in flags else ()
    return {f: v for f, v in flags.items() if f in kept or not (f == CONTEXT or f.startswith("cp-"))}


def _changed(
    full: Mapping[str, Value], here: Mapping[str, Value], reasons: Mapping[str, str]
) -> dict[str, tuple[Value, Value, str]]:
    """Flag -> full, here, why; for all flags that differ."""
    return {
        flag: (full.get(flag), here.get(flag), SHAPE if flag in _SHAPES else reasons.get(flag, NARROW))
        for flag in dict.fromkeys([*full, *here])
        if words(flag, full.get(flag)) != words(flag, here.get(flag))
    }
