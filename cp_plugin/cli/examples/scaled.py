"""The same parallel shape with narrow layers: a few real steps of Megatron on CPU ranks, against CP 1.

Provider, layout, grid, rings, head axis, layer pattern, tensor and pipeline parallelism are the example's, the sizes of
grids and rings in proportion to the ranks. What is changed is listed, each flag with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cp_plugin.cli.examples.command import AXES, CONTEXT, Command, words
from cp_plugin.cli.examples.config import Value, merged
from cp_plugin.cli.examples.shapes import resized
from cp_plugin.cli.examples.sizes import refusal
from cp_plugin.cli.examples.training import TOLERANCE

FIRST_STEP = 1e-6
"""Largest relative difference of the first loss: the weights are the same."""
HALF = 2e-4
"""Largest relative difference of a loss of a bfloat16 model, whose payloads may travel in FP8 (docs/fp8.md)."""

NARROW = "narrow layers, or a training of a few steps"
SHAPE = "fewer ranks of the same shape"
_PRECISION = ("bf16", "fp16")
_KEPT_ALONE = ("cp-linear-attention", "cp-layer-pattern")
"""Of ``cp-...``, what also a run with one context-parallel rank has."""
_REASONS: Mapping[str, str] = {
    "fp8-format": "matrices in FP8 are Transformer Engine's, on CUDA",
    "fp8-recipe": "matrices in FP8 are Transformer Engine's, on CUDA",
    "use-megatron-fsdp": "divides parameters, not attention, over ranks by means of NCCL",
    "use-torch-fsdp2": "divides parameters, not attention, over ranks by means of NCCL",
    "data-parallel-sharding-strategy": "of --use-megatron-fsdp",
    "optimizer-cpu-offload": "everything is on the CPU here",
    "optimizer-offload-fraction": "everything is on the CPU here",
    "use-precision-aware-optimizer": "is Transformer Engine's, on CUDA",
    "overlap-cpu-optimizer-d2h-h2d": "everything is on the CPU here",
    "ckpt-format": "nothing is saved",
    "save-interval": "nothing is saved",
}
"""Flags that are left out on the CPU, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Two trainings."""

    command: Command
    """The full one."""
    ranks: int
    alone: int
    """Ranks of the one with CP 1: tensor and pipeline parallelism as in the other."""
    many: Mapping[str, Mapping[str, Value]]
    """Flags by section, with context parallelism."""
    one: Mapping[str, Mapping[str, Value]]
    changed: Mapping[str, tuple[Value, Value, str]]
    """Flag -> in the full command, here, and why."""
    tolerance: float
    first: float

    @property
    def context(self) -> int:
        """Context-parallel ranks."""
        return self.ranks // self.alone

    def flags(self, sections: Mapping[str, Mapping[str, Value]]) -> list[str]:
        """As on a command line."""
        return [word for some in sections.values() for pair in some.items() for word in words(*pair)]


def scaled(command: Command, ranks: int) -> Scaled:
    """What to train on so many ranks.

    Raises:
        ValueError: for a number of ranks over which the example cannot be divided.
    """
    narrow = merged(command.sections, command.experiment.scaled)
    length = command.experiment.scaled_length
    narrow["length"] = {"seq-length": length, "max-position-embeddings": length}
    plain, reasons = _on_cpu(narrow)
    small = replace(command, nodes=1, per_node=ranks, seq_length=length, sections=plain)
    tensor, pipeline = (small.size(axis) for axis in AXES)
    context, rest = divmod(ranks, tensor * pipeline)
    if rest or context < 2:
        raise ValueError(
            f"--scaled {ranks}: use a multiple of {tensor * pipeline}, and at least {2 * tensor * pipeline}: tensor "
            f"{tensor} x pipeline {pipeline} x at least 2 context-parallel ranks"
        )
    shaped = {**plain, "parallel": resized(dict(plain["parallel"]), context)}
    small = replace(small, sections=shaped)
    reason = refusal(small)
    if reason is not None:
        raise ValueError(f"--scaled {ranks}: {reason}")
    half = _in_half({flag: value for some in shaped.values() for flag, value in some.items()})
    return Scaled(
        command=command,
        ranks=ranks,
        alone=tensor * pipeline,
        many=shaped,
        one=_alone(shaped),
        changed=_changed(command, shaped, reasons),
        tolerance=HALF if half else TOLERANCE,
        first=HALF if half else FIRST_STEP,
    )


def _on_cpu(sections: Mapping[str, Mapping[str, Value]]) -> tuple[dict[str, dict[str, Value]], dict[str, str]]:
    """The flags as they run here, and why those differ that do."""
    found = {section: dict(some) for section, some in sections.items()}
    reasons: dict[str, str] = {}
    flat = {flag: value for some in found.values() for flag, value in some.items()}
    fp8, half = flat.get("cp-fp8"), _in_half(flat)
    for some in found.values():
        for flag in [flag for flag in some if flag in _REASONS or flag.startswith("fp8-")]:
            reasons[flag] = _REASONS.get(flag, _REASONS["fp8-format"])
            del some[flag]
        for flag in [flag for flag in some if flag in _PRECISION and not half]:
            reasons[flag] = "float32, in which equal gradients give equal losses"
            del some[flag]
    if fp8 == "compute":
        found["parallel"]["cp-backend"] = "float8"
        reasons["cp-backend"] = (
            "the numerics of FP8 attention on any device; the kernel is Transformer Engine's, on Hopper"
        )
    elif flat.get("cp-backend") not in (None, "auto", "sdpa", "reference"):
        found["parallel"].pop("cp-backend", None)
        reasons["cp-backend"] = "that kernel runs on CUDA only"
    ours = {"calculate-per-token-loss": True, "disable-gloo-process-groups": True, "num-workers": 0}
    found["here"] = {flag: value for flag, value in ours.items() if flag not in flat}
    reasons["calculate-per-token-loss"] = "losses are summed alike with and without context parallelism"
    reasons["disable-gloo-process-groups"] = "all groups are Gloo's here already"
    reasons["num-workers"] = "no further processes"
    return found, reasons


def _in_half(flags: Mapping[str, Value]) -> bool:
    """Whether flags are given that mean nothing in float32."""
    return bool(flags.get("cp-fp8")) or flags.get("cp-gradient-dtype") == "model"


def _alone(sections: Mapping[str, Mapping[str, Value]]) -> dict[str, dict[str, Value]]:
    """The same without context parallelism."""
    found = {section: dict(some) for section, some in sections.items()}
    linear = "cp-linear-attention" in found["parallel"]
    kept = {
        flag: value
        for flag, value in found["parallel"].items()
        if flag != CONTEXT and (not flag.startswith("cp-") or (linear and flag in _KEPT_ALONE))
    }
    return {**found, "parallel": kept}


def _changed(
    command: Command, shaped: Mapping[str, Mapping[str, Value]], reasons: Mapping[str, str]
) -> dict[str, tuple[Value, Value, str]]:
    """Flag -> full, here, why; for all that differ."""
    full = {flag: value for some in command.sections.values() for flag, value in some.items()}
    full |= {"seq-length": command.seq_length}
    full.setdefault("max-position-embeddings", command.seq_length)
    here = {flag: value for some in shaped.values() for flag, value in some.items()}
    shape = (CONTEXT, "cp-grid", "cp-intra-size", "cp-head-parallel")
    found: dict[str, tuple[Value, Value, str]] = {}
    for flag in dict.fromkeys([*full, *here]):
        before, now = full.get(flag), here.get(flag)
        if words(flag, before) != words(flag, now):
            found[flag] = (before, now, SHAPE if flag in shape else reasons.get(flag, NARROW))
    return found
