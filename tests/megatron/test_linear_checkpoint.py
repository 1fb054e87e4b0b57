"""Distributed checkpoints of hybrid models: saved and resumed on other numbers of ranks, training goes on as if never
interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SGD, train
from nightly import slow

pytestmark = pytest.mark.usefixtures("adapter")

MODEL = "--num-layers 4 --cp-linear-attention gla --cp-layer-pattern LLLN --make-vocab-size-divisible-by 64"
ADAM = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 0.001")
CLOSE = 1e-5


@slow
def test_resumed_on_other_ranks(tmp_path: Path) -> None:
    files = f"--ckpt-format torch_dist --save {tmp_path} --save-interval 2"
    unbroken = train(2, f"{MODEL} --context-parallel-size 2", steps=4, training=ADAM)[0].losses
    before = train(2, f"{MODEL} --context-parallel-size 2 {files}", steps=2, training=ADAM)[0].losses
    assert before == unbroken[:2]
    load = f"--ckpt-format torch_dist --load {tmp_path} --override-opt-param-scheduler"
    for ranks, parallel in (
        (4, "--context-parallel-size 4"),
        (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
        (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2"),
    ):
        after = train(ranks, f"{MODEL} {parallel} {load}", steps=4, training=ADAM)[-1].losses
        assert len(after) == 2, parallel
        errors = [abs(a / b - 1) for a, b in zip(after, unbroken[2:], strict=True)]
        assert max(errors) <= CLOSE, (parallel, after, unbroken)
