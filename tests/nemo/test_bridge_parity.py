"""Bridge's own loop on CPU ranks: context-parallel losses and gradients are those of one rank without the plugin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from bridge_harness import LOSS, Record, check_same, one_rank, train
from nightly import nightly

STRIPED = {"provider": "striped"}
PROVIDERS = {
    "striped": (2, STRIPED),
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
    check_same(train(*PROVIDERS[name]), one_rank())
    told = capfd.readouterr().out
    assert "2 of 2 replaced" in told and "self-check passed" in told


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    ranks, fields = VARIANTS[name]
    reference = train(ranks, model=fields)[-1]  # initial weights depend on the tensor-parallel size
    records = train(2 * ranks, STRIPED, model={"context_parallel_size": 2, **fields})
    assert len(reference.losses) == 3 and records[-1].losses == pytest.approx(reference.losses, rel=LOSS)


def test_a_spec_that_was_made_before() -> None:
    def with_spec(config: Any) -> None:
        from megatron.bridge.models.gpt_provider import local_layer_spec

        config.model.transformer_layer_spec = local_layer_spec(config.model)

    for record in train(2, STRIPED, change=with_spec):
        assert record.losses == pytest.approx(one_rank().losses, rel=LOSS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"linear_attention": "gla", "layer_pattern": "LN"},
        pytest.param({"linear_attention": "lightning"}, marks=nightly),
    ],
    ids=str,
)
def test_linear_attention(arguments: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    check_same(train(2, {**arguments, "linear_provider": "lasp2"}), train(1, arguments)[0])
    linear = 2 - arguments.get("layer_pattern", "LL").count("N")
    assert f"2 of 2 replaced: {linear} linear, {2 - linear} softmax" in capfd.readouterr().out


def test_the_planner_chooses(capfd: pytest.CaptureFixture[str]) -> None:
    check_same(train(2, {"provider": "auto"}), one_rank())
    told = capfd.readouterr().out
    assert told.count("cp_plugin: auto: equivalent flags without the planner: provider ") == 1
    assert "predicted" in told.partition("| auto")[2]


def _with_evaluation(config: Any) -> None:
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.train.train_iters = 4


def _evaluate_on(size: int) -> dict[str, Callable[[Any], None]]:
    """Callbacks by which evaluations have context-parallel groups of this size."""
    groups: dict[str, Any] = {}

    def make_groups(context: Any) -> None:
        import torch.distributed as dist
        from megatron.bridge.training.utils.pg_utils import get_pg_collection

        groups["train"] = get_pg_collection(context.model)
        groups["eval"] = context.state._eval_pgs = copy.copy(groups["train"])
        groups["eval"].cp = dist.new_subgroups(size)[0]
        across = [list(range(first, dist.get_world_size(), size)) for first in range(size)]
        groups["eval"].dp = dist.new_subgroups_by_enumeration(across)[0]
        assert dist.get_rank() in dist.get_process_group_ranks(groups["eval"].cp)

    def install(which: str) -> Callable[[Any], None]:
        def call(context: Any) -> None:
            from megatron.bridge.training.eval_context_parallel_rebinding import install_pg_collection

            install_pg_collection(context.model, groups[which])

        return call

    return {"on_data_init_start": make_groups, "on_eval_start": install("eval"), "on_eval_end": install("train")}


@cache
def _evaluated_alone(data_parallel: int) -> Record:
    """The same training and evaluation without the plugin; Bridge's validation data depends on this size."""
    return train(data_parallel, change=_with_evaluation)[0]


@pytest.mark.parametrize(("ranks", "train_size", "eval_size"), [(2, 2, 2), (2, 2, 1), (4, 2, 4)])
def test_training_goes_on_after_an_evaluation(ranks: int, train_size: int, eval_size: int) -> None:
    """Evaluation with context-parallel groups of another size (Bridge's rebinding)."""
    model, reference = {"context_parallel_size": train_size}, _evaluated_alone(ranks // eval_size)
    assert len(reference.eval_losses) >= 2 and len(reference.losses) == 4
    for record in train(ranks, STRIPED, model=model, change=_with_evaluation, events=_evaluate_on(eval_size)):
        assert record.losses == pytest.approx(reference.losses, rel=LOSS)
        assert record.eval_losses == pytest.approx(reference.eval_losses, rel=LOSS)
