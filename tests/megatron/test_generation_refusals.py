"""The rules of generation: every rule refuses its example, in a message that names value and fix."""

from __future__ import annotations

import pytest
from rule_examples import check, example

from cp_plugin.megatron.rules import inference

pytestmark = pytest.mark.usefixtures("adapter")
MODELS = {
    "pipeline stages of a generation": example("--pipeline-model-parallel-size 2", stages=2),
    "attention of a generation": example("none of this model's attention layers", layers=0),
    "sequence parallelism of a generation": example("--sequence-parallel", sequence_parallel=True),
    "states of a generation": example("Mamba layers (M)", stateful="Mamba layers (M)"),
    "layouts of a generation": example("--linear-cp-layout contiguous", converted=True),
    "other attention of a generation": example("TEDotProductAttention", other_attention="TEDotProductAttention"),
}


def test_rules_of_generation() -> None:
    for rule in inference.CONTINUED:
        assert rule.of(inference.Continued()) is None
        given = MODELS[rule.name]
        check(rule, rule.of(inference.Continued(**given.args)), given.names)
