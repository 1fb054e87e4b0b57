"""``--cp-check-every``: right trainings pass it, bit for bit as without it, and it compares what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import SGD, train

pytestmark = pytest.mark.usefixtures("adapter")

STRIPED = "--context-parallel-size 2 --cp-provider striped"


def _spy() -> None:
    """Each comparison is printed: what, how far off, what rounding allows."""
    from cp_plugin.megatron import recheck_rows

    judge = recheck_rows.Rows._judge

    def judged(self: Any, name: str, got: torch.Tensor, want: Any) -> None:
        found = recheck_rows.compare(got, want, self.rounding)
        print(f"CHECKED {name} {type(self).__name__} step {self.place.step} {found.error:.3e} {found.allowed:.3e}")
        judge(self, name, got, want)

    recheck_rows.Rows._judge = judged


RIGHT = (
    STRIPED,
    f"{STRIPED} --bf16",
    f"{STRIPED} --fp16 --initial-loss-scale 65536",
    f"{STRIPED} --window-size 3,0 --softmax-type learnable",
    f"{STRIPED} --dataloader-inter-document-masking",
    f"{STRIPED} --cp-fp8 comm --bf16",
    f"{STRIPED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    f"{STRIPED} --recompute-granularity selective --recompute-modules core_attn --cp-recompute-attention",
    "--context-parallel-size 4 --cp-provider attention2d --cp-grid 2x2 --cp-layout zigzag",
    "--context-parallel-size 4 --cp-provider burst --cp-backward q --cp-intra-size 2",
    "--context-parallel-size 4 --cp-provider striped --cp-head-parallel 2",
    f"{STRIPED} --pipeline-model-parallel-size 2",
    f"{STRIPED} --tensor-model-parallel-size 2",
    "--context-parallel-size 2 --cp-linear-attention basic",
    "--context-parallel-size 2 --cp-linear-attention gla --cp-layer-pattern LN --cp-provider ring --bf16",
    "--context-parallel-size 2 --cp-linear-attention lightning --bf16",
    "--context-parallel-size 2 --cp-linear-attention retention",
    "--context-parallel-size 2 --cp-linear-attention rebased",
)


@pytest.mark.parametrize("flags", RIGHT)
def test_a_right_training_passes(flags: str, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = math.prod(
        int(word) for before, word in zip(flags.split(), flags.split()[1:]) if before.endswith("-parallel-size")
    )
    train(ranks, f"{flags} --cp-check-every 1", steps=6, prepare=_spy)
    lines = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("CHECKED")]
    print(
        flags,
        sorted({round(float(error) / float(allowed), 3) for *_, error, allowed in lines})[-3:],
        len(lines),
        {l[1] for l in lines},
    )
