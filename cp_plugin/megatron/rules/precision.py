"""Rules of FP8 attention (``--cp-fp8 compute``) and of determinism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cp_plugin.megatron.rules.rule import Match, Rule, when

if TYPE_CHECKING:
    from cp_plugin.megatron.rules.run import Run


def _computes(run: Run) -> bool:
    return run.settings.options.fp8 == "compute"


def _recipe(run: Run) -> str | None:
    """The FP8 recipe of linear layers."""
    return getattr(run.args, "fp8_recipe", None) if getattr(run.args, "fp8", None) else None


def _linear_layers(run: Run) -> Match:
    mxfp8, fp4 = _recipe(run) == "mxfp8", getattr(run.args, "fp4", None)
    return when(_computes(run) and (mxfp8 or fp4), recipe="--fp8-recipe mxfp8" if mxfp8 else "--fp4-format")


RULES = (
    Rule(
        name="blockwise and custom FP8",
        example="--fp8-recipe blockwise --fp8-format e4m3 --cp-fp8 compute | "
        "--fp8-recipe custom --fp8-format e4m3 --cp-fp8 compute",
        what="--fp8-recipe {0.args.fp8_recipe} with --cp-fp8 compute",
        why="attention kernels, ours and Transformer Engine's, use one scale per tensor, and would ignore the recipe",
        fix="use --fp8-recipe tensorwise or delayed, or --cp-fp8 comm (or {0.settings.instead})",
        looks_at=lambda run: _computes(run) and _recipe(run) in ("blockwise", "custom"),
        sentence=True,
    ),
    Rule(
        name="first and last layers in bfloat16",
        example="--first-last-layers-bf16 --cp-fp8 compute",
        what="--first-last-layers-bf16 with --cp-fp8 compute, which applies to all layers",
        fix="use --cp-fp8 comm (or {0.settings.instead})",
        looks_at=lambda run: _computes(run) and getattr(run.args, "first_last_layers_bf16", False),
        sentence=True,
    ),
    Rule(
        name="recipes of linear layers",
        example="--fp8-recipe mxfp8 --fp8-format e4m3 --cp-fp8 compute | --fp4-format e2m1 --cp-fp8 compute",
        kind="warn",
        what="{recipe} applies to linear layers only",
        why="attention uses FP8 with one scale per tensor (current scaling)",
        looks_at=_linear_layers,
    ),
    Rule(
        name="determinism on CUDA",
        example="--deterministic-mode --cp-device cuda",
        what="--deterministic-mode on CUDA",
        why="only CPU kernels are tested",
        fix="leave it out",
        looks_at=lambda run: run.args.deterministic_mode and (run.device is None or run.device.type == "cuda"),
        late=True,
    ),
)
