"""64 context-parallel ranks: one step of Megatron's training loop on an 8 x 8 grid equals one rank's.

The heads are those of ATTENTION2D's 760M model (arXiv 2503.15758), 16 of them; all else is small. The ranks share this
machine's cores: about a minute on two of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from harness import SGD, train
from nightly import nightly
from parity import compare, stock

RANKS = 64
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 16 --kv-channels 16 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 "
    "--hidden-dropout 0 --disable-gloo-process-groups"
)
TRAINING = SGD.replace("--micro-batch-size 2 --global-batch-size 4", "--micro-batch-size 1 --global-batch-size 1")
TIMEOUT = 900.0


@nightly
def test_a_step_on_64_ranks(adapter: None, capfd: pytest.CaptureFixture[str]) -> None:
    say = _progress(capfd)
    base = stock(1, "", steps=1, model=MODEL, training=TRAINING)
    say(f"one rank is done; training on {RANKS} ranks, one step")
    flags = f"--context-parallel-size {RANKS} --cp-provider attention2d --cp-grid 8x8"
    got = train(RANKS, flags, steps=1, model=MODEL, training=TRAINING, timeout=TIMEOUT)
    say("comparing")
    assert len(got) == RANKS
    assert sorted(record.coordinates["cp"] for record in got) == list(range(RANKS))
    compare(got, base, steps=1)
    for record in got:
        assert record.sent == record.formula, record.coordinates
    text = capfd.readouterr().out
    assert "8x8" in text and "self-check passed" in text
    worst = max((r.grads[name] - g).norm() / g.norm() for r in got for name, g in base[0].grads.items())
    assert torch.isfinite(worst)
    say(f"loss {got[0].losses[0]:.6f}, one rank {base[0].losses[0]:.6f}; gradients within {worst:.1e}")


def _progress(capfd: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    start = time.monotonic()

    def say(text: str) -> None:
        with capfd.disabled():
            print(f"\n  64 ranks, {time.monotonic() - start:.0f} s: {text}", end="", flush=True)

    return say
