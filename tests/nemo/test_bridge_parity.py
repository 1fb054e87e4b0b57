"""Bridge's own loop on CPU ranks: context-parallel losses and gradients are those of one rank without the plugin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bridge_harness import LOSS, check_same, one_rank, train
from nightly import nightly

pytestmark = pytest.mark.usefixtures("bridge")

PROVIDERS = {
    "striped": (2, {"provider": "striped"}),
    "ring, zigzag": (2, {"provider": "ring", "layout": "zigzag"}),
    "ulysses": (2, {"provider": "ulysses"}),
    "attention2d": (4, {"provider": "attention2d", "grid": (2, 2)}),
    "double ring": (4, {"provider": "double_ring", "intra_size": 2}),
}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor and sequence parallel": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}),
    "full recompute": (
        1,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}
"""Ranks without context parallelism, and fields of the model."""


@pytest.mark.parametrize("name", PROVIDERS)
def test_providers(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    ranks, asked = PROVIDERS[name]
    check_same(train(ranks, asked, model={"context_parallel_size": ranks}), one_rank())
    told = capfd.readouterr().out
    assert "2 of 2 replaced" in told and "self-check passed" in told


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    ranks, fields = VARIANTS[name]
    reference = train(ranks, model=fields)[-1]  # initial weights depend on the tensor-parallel size
    records = train(2 * ranks, {"provider": "striped"}, model={"context_parallel_size": 2, **fields})
    assert len(reference.losses) == 3 and records[-1].losses == pytest.approx(reference.losses, rel=LOSS)


def test_a_spec_that_was_made_before() -> None:
    def with_spec(config: Any) -> None:
        from megatron.bridge.models.gpt_provider import local_layer_spec

        config.model.transformer_layer_spec = local_layer_spec(config.model)

    for record in train(2, {"provider": "striped"}, model={"context_parallel_size": 2}, change=with_spec):
        assert record.losses == pytest.approx(one_rank().losses, rel=LOSS)


@pytest.mark.parametrize(
    "asked",
    [
        {"linear_attention": "gla", "layer_pattern": "LN"},
        pytest.param({"linear_attention": "lightning"}, marks=nightly),
    ],
    ids=str,
)
def test_linear_attention(asked: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    divided = train(2, {**asked, "linear_provider": "lasp2"}, model={"context_parallel_size": 2})
    check_same(divided, train(1, asked)[0])
    linear = 2 - asked.get("layer_pattern", "LL").count("N")
    assert f"2 of 2 replaced: {linear} linear, {2 - linear} softmax" in capfd.readouterr().out


def test_the_planner_chooses(capfd: pytest.CaptureFixture[str]) -> None:
    check_same(train(2, {"provider": "auto"}, model={"context_parallel_size": 2}), one_rank())
    told = capfd.readouterr().out
    assert told.count("cp_plugin: auto: equivalent flags without the planner: provider ") == 1
    assert "predicted" in told.partition("| auto")[2]
