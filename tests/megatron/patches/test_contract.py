"""Validation: right however unevenly unmasked tokens lie on the ranks. Loss functions: ``cases.toml`` (masks)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from feature_faults import CONTIGUOUS
from scripts import mask_the_first_half
from training import SGD, train

pytestmark = pytest.mark.usefixtures("adapter")


def _fine_tuning_validates(model: torch.nn.Module) -> list[float]:
    """Make validation average the losses of micro-batches, as with --sft; the losses that it will find."""
    from megatron.training import training

    evaluate, arguments, losses = training.evaluate, training.get_args, []

    def as_fine_tuning(*positional: Any, **named: Any) -> Any:
        training.get_args = lambda: Namespace(**(vars(arguments()) | {"sft": True}))
        try:
            results = evaluate(*positional, **named)
        finally:
            training.get_args = arguments
        losses.append(results[0]["lm loss"].item())
        return results

    training.evaluate = as_fine_tuning
    return losses


def test_validation_of_fine_tuning_is_that_of_one_rank() -> None:
    """Megatron's mean of means takes a rank without unmasked tokens for one with a loss of zero."""
    training = SGD.replace("--eval-iters 0 --eval-interval 1000", "--eval-iters 1 --eval-interval 1")

    def validated(ranks: int, flags: str) -> float:
        records = train(ranks, flags, training=training, prepare=mask_the_first_half, ask=_fine_tuning_validates)
        return records[0].result[-1]

    alone = validated(1, "--calculate-per-token-loss")
    assert validated(2, CONTIGUOUS) == pytest.approx(alone, rel=1e-6)
