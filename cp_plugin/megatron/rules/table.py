"""All rules, by subject: training runs, layers, calls, generation."""

from __future__ import annotations

from cp_plugin.megatron.flags.option_flags import AUTO
from cp_plugin.megatron.rules import experts, flags, inference, layers, layout, linear, models, precision
from cp_plugin.megatron.rules.rule import Rule, when
from cp_plugin.megatron.rules.run import Run
from cp_plugin.methods import registry as providers

TRAINING = (*flags.RULES, *models.RULES, *precision.RULES, *layout.RULES, *experts.RULES, *experts.PADDING)
"""For every training with the plugin, in reporting order."""
LINEAR = linear.RULES
ON_CPU = Rule(
    name="upstream on the CPU",
    what="--context-parallel-size {size} on the CPU needs --cp-provider with one of {names}",
    why="stock Megatron's context parallelism needs Transformer Engine, on CUDA",
    fix="add one, or leave --context-parallel-size out",
    looks_at=lambda run: when(
        not run.settings.active and run.args.context_parallel_size > 1 and _attends(run),
        size=run.args.context_parallel_size,
        names=", ".join([AUTO, *providers.names()]),
    ),
    sentence=True,
)


def _attends(run: Run) -> bool:
    """Whether some layer has an attention that only Transformer Engine divides."""
    return "*" in (models.pattern_of(run) or "*") and not getattr(run.args, "experimental_attention_variant", None)


RULES: dict[str, tuple[Rule, ...]] = {
    "all": (*TRAINING, ON_CPU),
    "linear attention": LINEAR,
    "a layer": layers.LAYER,
    "a linear layer": layers.LINEAR_LAYER,
    "a call of a layer": layers.CALL,
    "generation": inference.CONTINUED,
}
"""By subject."""
