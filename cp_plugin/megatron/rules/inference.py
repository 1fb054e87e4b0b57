"""Rules of generation: models that can be decoded."""

from __future__ import annotations

from dataclasses import dataclass

from cp_plugin.megatron.rules.rule import Rule, given, refuse, when


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """A model to decode with."""

    stages: int = 1  # pipeline stages
    layers: int = 1  # attention layers with a cache
    sequence_parallel: bool = False
    stateful: str = ""  # layers whose state is not kept between tokens
    converted: bool = False  # attention has another layout than the other layers
    other_attention: str = ""  # an attention class that is neither the plugin's nor Megatron's


CONTINUED = (
    Rule(
        name="pipeline stages of a generation",
        what="generation runs on one pipeline stage, got --pipeline-model-parallel-size {stages}",
        fix="use 1; a torch_dist checkpoint can be loaded with any number of stages",
        looks_at=lambda model: when(model.stages > 1, stages=model.stages),
    ),
    Rule(
        name="attention of a generation",
        what="generation supports none of this model's attention layers",
        fix="use --transformer-impl local",
        looks_at=lambda model: when(model.layers == 0),
    ),
    Rule(
        name="sequence parallelism of a generation",
        what="generation runs without --sequence-parallel",
        why="it would split single tokens",
        fix="leave it out",
        looks_at=given("sequence_parallel"),
    ),
    Rule(
        name="states of a generation",
        what="generation cannot continue {stateful}",
        why="the plugin does not keep their state between tokens",
        fix="use a model without them",
        looks_at=given("stateful"),
    ),
    Rule(
        name="layouts of a generation",
        what="generation runs without --linear-cp-layout contiguous",
        why="it shards a prompt in attention's layout",
        fix="leave it out",
        looks_at=given("converted"),
    ),
    Rule(
        name="other attention of a generation",
        what="generation cannot continue {other_attention}",
        fix="use --transformer-impl local, or two or more context-parallel ranks with --cp-provider",
        looks_at=given("other_attention"),
    ),
)


def check_continued(model: Continued) -> None:
    """ValueError for a model that generation does not support."""
    refuse(CONTINUED, model)
