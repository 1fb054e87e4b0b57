"""Faults planted in a Bridge training, each of which is caught before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bridge_harness import train
from fault_rows import instead, stock

from cp_plugin.testing.launch import RankError

STEP = "megatron.bridge.training.gpt_step:get_batch_on_this_cp_rank"
ROPE = "megatron.core.models.common.embeddings.rotary_pos_embedding:get_pos_emb_on_this_cp_rank"


@instead("megatron.core.transformer.transformer_layer:TransformerLayer.__init__")
def layer_without_the_provider(build: Any, layer: Any, *args: object, **kwargs: object) -> None:
    build(layer, *args, **kwargs)
    if layer.layer_number == 2:
        layer.self_attention.core_attention = torch.nn.Identity()


@instead("megatron.bridge.training.pretrain:runtime_config_update")
def config_that_changes_after_apply(update: Any, config: Any) -> None:
    config.model.calculate_per_token_loss = False
    update(config)


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "a batch that is cut otherwise": (
        stock("cut", f"{STEP}=megatron.core.utils:get_batch_on_this_cp_rank"),
        "without slicing its batch",
    ),
    "a batch that is not cut": (
        instead(STEP)(lambda cut, batch, **kwargs: batch),
        "without slicing its batch",
    ),
    "RoPE of other positions": (
        instead(ROPE)(lambda cut, angles, *rest: cut(angles, *rest).flip(0)),
        "differs from the step on one rank",
    ),
    "a layer without the provider": (
        layer_without_the_provider,
        r"not run in every attention layer of this model: 1 of 2.*core_attention",
    ),
    "a config that changes after apply": (
        config_that_changes_after_apply,
        r"changed after cp_plugin.nemo.apply.*call apply once the config is complete",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, message = FAULTS[name]
    selfcheck = "off" if name == "a batch that is not cut" else "once"
    with pytest.raises(RankError, match=message):
        train(2, {"provider": "striped", "selfcheck": selfcheck}, prepare=plant)


def test_ranks_that_disagree() -> None:
    def other_base(config: Any) -> None:
        config.model.rotary_base = 10000 * (1 + int(os.environ["RANK"]))

    words = r"different settings: --rotary-base is 10000 on rank 0 and 20000 on rank 1|rotary_base is 10000 on rank 0"
    with pytest.raises(RankError, match=words):
        train(2, {"provider": "striped"}, change=other_base)


def test_cpu_mode_is_too_late_for_bridge_as_imported() -> None:
    from cp_plugin.nemo import cpu

    with pytest.raises(RuntimeError, match="imported before CPU mode"):
        cpu.activate()
