"""Stock Megatron in CPU mode: parallelism does not change the losses, and each feature trains.

Initial weights do not depend on the parallel sizes, so that losses agree up to float32 rounding, except with pipeline
parallelism: Megatron seeds each stage separately.
"""

from __future__ import annotations

import functools

import pytest
from harness import SGD, train
from nightly import one_case

STEPS = 5
ADAM = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 1e-3")

pytestmark = pytest.mark.usefixtures("adapter")


@functools.cache
def losses(ranks: int, flags: str = "", training: str = ADAM) -> list[float]:
    return next(record.losses for record in train(ranks, flags, steps=STEPS, training=training) if record.losses)


@one_case
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ""),
        (2, "--use-distributed-optimizer"),
        (2, "--overlap-grad-reduce"),
        (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
        (2, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64"),
        (2, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --sequence-parallel"),
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (1, "--recompute-granularity selective"),
        (1, "--calculate-per-token-loss"),
    ],
)
def test_parallelism_keeps_the_losses(ranks: int, flags: str) -> None:
    assert losses(ranks, flags) == pytest.approx(losses(1), rel=1e-5)


@one_case
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ""),
        (2, "--pipeline-model-parallel-size 2"),
        (2, "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
        (1, "--bf16"),
        (2, "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.1"),
        (1, "--normalization LayerNorm"),
    ],
)
def test_loss_decreases(ranks: int, flags: str) -> None:
    series = losses(ranks, flags)
    assert len(series) == STEPS and series[-1] < series[0] - 0.02


def test_bfloat16_follows_float32() -> None:
    assert losses(1, "--bf16") == pytest.approx(losses(1), rel=5e-3)
    assert losses(1, "--bf16") != losses(1)
