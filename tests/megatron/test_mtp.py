"""Multi-token prediction under context parallelism: next tokens, losses over all ranks' tokens, gradients."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import pytest
import torch
from harness import Record, train
from nightly import one_case
from parity import check, compare, stock

pytestmark = pytest.mark.usefixtures("adapter")

UNEVEN = "--eod-mask-loss"  # masks unequally many tokens on the ranks
PER_TOKEN = "--calculate-per-token-loss"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def compare_losses(got: Sequence[Record], want: Sequence[Record]) -> None:
    """Megatron reports the mean of the ranks' values."""
    tracked = torch.stack([r.mtp_losses[0] for r in got if r.mtp_losses]).mean(0)
    torch.testing.assert_close(tracked, next(r for r in want if r.mtp_losses).mtp_losses[0], rtol=1e-6, atol=0)


CASES = {
    "contiguous": (1, 2, "--mtp-num-layers 1", "ring --cp-layout contiguous"),
    "zigzag, two depths": (1, 4, "--mtp-num-layers 2", "ring --cp-layout zigzag"),
    "zigzag, means of means": (1, 2, "--mtp-num-layers 1", "ring --cp-layout zigzag"),
    "striped, two depths": (1, 4, "--mtp-num-layers 2", "striped"),
    "attention2d, striped": (1, 4, "--mtp-num-layers 1", "attention2d --cp-grid 2x2 --cp-layout striped"),
    "sequence parallel, recomputed": (2, 2, f"--mtp-num-layers 1 {RECOMPUTE} {SEQUENCE}", "striped"),
    "pipeline": (2, 2, "--mtp-num-layers 2 --pipeline-model-parallel-size 2", "striped"),
}


@one_case
@pytest.mark.parametrize("case", CASES)
def test_as_on_one_rank(case: str) -> None:
    ranks, cp, model, provider = CASES[case]
    flags = model if case == "zigzag, means of means" else f"{model} {PER_TOKEN} {UNEVEN}"
    got, want = check(flags, f"--cp-provider {provider}", cp=cp, ranks=ranks)
    compare_losses(got, want)
    assert any(name.startswith("0.module.mtp.") for record in got for name in record.grads)


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
        compare(got, stock(1, flags, steps=2), steps=2)


def test_layers_on_another_stage_than_the_last_are_not_carried() -> None:
    from cp_plugin.megatron.models import gpt

    with pytest.raises(ValueError, match="--mtp-num-layers with --pipeline-model-parallel-layout"):
        gpt.refuse(argparse.Namespace(mtp_num_layers=1, pipeline_model_parallel_layout="Et|m|L"))
