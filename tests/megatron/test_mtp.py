"""Multi-token prediction under context parallelism: what stock Megatron and planted faults get wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
from training import compare, stock, train

pytestmark = pytest.mark.usefixtures("adapter")

UNEVEN = "--eod-mask-loss"  # masks unequally many tokens on the ranks
PER_TOKEN = "--calculate-per-token-loss"


def _stock_roll() -> None:
    from megatron.core.transformer import multi_token_prediction

    from cp_plugin.megatron.patches import patching

    multi_token_prediction.roll_tensor = patching.original(f"{multi_token_prediction.__name__}:roll_tensor")


def _stock_counts() -> None:
    from megatron.core.models.gpt import gpt_model
    from megatron.core.transformer import multi_token_prediction

    from cp_plugin.megatron.patches import patching

    gpt_model.process_mtp_loss = patching.original(f"{multi_token_prediction.__name__}:process_mtp_loss")


def test_the_self_check_finds_next_tokens_of_another_layout() -> None:
    flags = "--mtp-num-layers 1 --context-parallel-size 2 --cp-provider striped"
    with pytest.raises(Exception, match="differs from the step on one rank"):
        train(2, flags, prepare=_stock_roll)


@pytest.mark.parametrize(("plant", "layout"), [(_stock_roll, "striped"), (_stock_counts, "zigzag")])
def test_stock_megatron_is_wrong(plant: Callable[[], None], layout: str) -> None:
    """Its zigzag shift on striped tokens; on zigzag, dividing by one rank's tokens instead of all ranks'."""
    flags = f"--mtp-num-layers 1 {PER_TOKEN} {UNEVEN}"
    provider = "striped" if layout == "striped" else "ring --cp-layout zigzag"
    got = train(2, f"{flags} --context-parallel-size 2 --cp-provider {provider} --cp-selfcheck off", prepare=plant)
    with pytest.raises(AssertionError, match="gradient of"):
        compare(got, stock(1, flags), steps=1)


def test_layers_on_another_stage_than_the_last_are_not_carried() -> None:
    from cp_plugin.megatron.models import gpt

    with pytest.raises(ValueError, match="--mtp-num-layers with --pipeline-model-parallel-layout"):
        gpt.refuse(argparse.Namespace(mtp_num_layers=1, pipeline_model_parallel_layout="Et|m|L"))
