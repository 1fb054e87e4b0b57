"""Linear attention in Bridge's models, and the planner's choice of a provider: losses and gradients of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from bridge_harness import check_same, one_rank, train
from nightly import slow

pytestmark = pytest.mark.usefixtures("bridge")

DIVIDED = {"context_parallel_size": 2}
KINDS: dict[str, dict[str, Any]] = {
    "all layers": {"linear_attention": "lightning"},
    "with softmax attention, gated": {"linear_attention": "gla", "layer_pattern": "LN"},
}


@pytest.mark.parametrize("kind", ["with softmax attention, gated", pytest.param("all layers", marks=slow)])
def test_linear_attention(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    asked = KINDS[kind]
    reference = train(1, asked)[0]
    check_same(train(2, {**asked, "linear_provider": "lasp2"}, model=DIVIDED), reference)
    linear = 2 - asked.get("layer_pattern", "LL").count("N")
    assert f"2 of 2 replaced: {linear} linear, {2 - linear} softmax" in capfd.readouterr().out


def test_the_planner_chooses(capfd: pytest.CaptureFixture[str]) -> None:
    check_same(train(2, {"provider": "auto"}, model=DIVIDED), one_rank())
    told = capfd.readouterr().out
    assert told.count("cp_plugin: auto: equivalent flags without the planner: provider ") == 1
    assert "predicted" in told.partition("| auto")[2]
