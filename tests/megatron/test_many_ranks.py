"""64 context-parallel ranks: one step of Megatron's training loop on an 8 x 8 grid equals one rank's.

The 16 heads are those of ATTENTION2D's 760M model (arXiv 2503.15758); everything else is small. On two cores the ranks
take about a minute.
"""

from __future__ import annotations

import pytest
from nightly import nightly
from training import SGD, check

RANKS = 64
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 16 --kv-channels 16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 "
    "--hidden-dropout 0 --disable-gloo-process-groups"
)
TRAINING = SGD.replace("--micro-batch-size 2 --global-batch-size 4", "--micro-batch-size 1 --global-batch-size 1")


@nightly
def test_a_step_on_64_ranks(adapter: None, capfd: pytest.CaptureFixture[str]) -> None:
    run = {"model": MODEL, "training": TRAINING, "timeout": 900}
    got, _ = check("", "--cp-provider attention2d --cp-grid 8x8", cp=RANKS, steps=1, counted=True, **run)
    assert sorted(record.coordinates["cp"] for record in got) == list(range(RANKS))
    text = capfd.readouterr().out
    assert "8x8" in text and "self-check passed" in text
