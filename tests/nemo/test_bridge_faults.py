"""Faults planted in a Bridge training, each of which is caught before the first step."""

from __future__ import annotations

import os

import pytest
import torch
from bridge_harness import train

from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("bridge")

STRIPED = {"provider": "striped"}
DIVIDED = {"context_parallel_size": 2}


def test_a_batch_that_is_cut_otherwise() -> None:
    def plant() -> None:
        from megatron.bridge.training import gpt_step

        from cp_plugin.megatron.patches import patching

        gpt_step.get_batch_on_this_cp_rank = patching.original("megatron.core.utils:get_batch_on_this_cp_rank")

    with pytest.raises(RankError, match="without slicing its batch"):
        train(2, STRIPED, model=DIVIDED, prepare=plant)


def test_a_batch_that_is_not_cut() -> None:
    def plant() -> None:
        from megatron.bridge.training import gpt_step

        gpt_step.get_batch_on_this_cp_rank = lambda batch, **kwargs: batch

    with pytest.raises(RankError, match="without slicing its batch"):
        train(2, {**STRIPED, "selfcheck": "off"}, model=DIVIDED, prepare=plant)


def test_rope_of_other_positions() -> None:
    def plant() -> None:
        from megatron.core.models.common.embeddings import rotary_pos_embedding

        slice_angles = rotary_pos_embedding.get_pos_emb_on_this_cp_rank
        rotary_pos_embedding.get_pos_emb_on_this_cp_rank = lambda angles, *rest: slice_angles(angles, *rest).flip(0)

    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(2, STRIPED, model=DIVIDED, prepare=plant)


def test_a_layer_without_the_provider() -> None:
    def plant() -> None:
        from megatron.core.transformer.transformer_layer import TransformerLayer

        build = TransformerLayer.__init__

        def planted(self: TransformerLayer, *args: object, **kwargs: object) -> None:
            build(self, *args, **kwargs)
            if self.layer_number == 2:
                self.self_attention.core_attention = torch.nn.Identity()

        TransformerLayer.__init__ = planted

    with pytest.raises(RankError, match=r"not run in every attention layer of this model: 1 of 2.*core_attention"):
        train(2, STRIPED, model=DIVIDED, prepare=plant)


def test_a_config_that_changes_after_apply() -> None:
    from megatron.bridge.training import pretrain

    def plant() -> None:
        update = pretrain.runtime_config_update

        def changed(config: object) -> None:
            config.model.calculate_per_token_loss = False
            update(config)

        pretrain.runtime_config_update = changed

    with pytest.raises(RankError, match=r"changed after cp_plugin.nemo.apply.*call apply once the config is complete"):
        train(2, STRIPED, model=DIVIDED, prepare=plant)


def test_ranks_that_disagree() -> None:
    def other_base(config: object) -> None:
        config.model.rotary_base = 10000 * (1 + int(os.environ["RANK"]))

    words = r"different settings: --rotary-base is 10000 on rank 0 and 20000 on rank 1|rotary_base is 10000 on rank 0"
    with pytest.raises(RankError, match=words):
        train(2, STRIPED, model=DIVIDED, change=other_base)


def test_cpu_mode_is_too_late_for_bridge_as_imported() -> None:
    from cp_plugin.nemo import cpu

    with pytest.raises(RuntimeError, match="imported before CPU mode"):
        cpu.activate()
