"""Distributed checkpoints of models with linear or state-space layers, resumed on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from nightly import nightly
from state_space_kernels import STATES
from training import SGD, train

from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version

ADAM = SGD.replace("--optimizer sgd --sgd-momentum 0", "--optimizer adam").replace("--lr 0.05", "--lr 0.001")
GLA = "--num-layers 4 --cp-linear-attention gla --cp-layer-pattern LLLN --make-vocab-size-divisible-by 64"
BOTH = "MG" if version_tuple(megatron_version()) >= (0, 19) else "M"
HYBRID = f"--hybrid-layer-pattern {BOTH}*-/*- {STATES} --calculate-per-token-loss --cp-provider striped"

pytestmark = pytest.mark.usefixtures("adapter")


@nightly
@pytest.mark.parametrize(
    ("flags", "others"),
    [
        (
            GLA,
            (
                "--context-parallel-size 4",
                "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
                "--context-parallel-size 2 --pipeline-model-parallel-size 2",
            ),
        ),
        (f"--seq-length 32 {HYBRID}", ("--context-parallel-size 4",)),
    ],
    ids=["gla", "hybrid"],
)
def test_resumed_on_other_ranks(flags: str, others: tuple[str, ...], tmp_path: Path) -> None:
    common = {"steps": 4, "training": ADAM}
    save = f"--context-parallel-size 2 --save {tmp_path} --save-interval 2"
    whole = train(2, f"{flags} --ckpt-format torch_dist {save}", **common)[0].losses
    load = f"--ckpt-format torch_dist --load {tmp_path} --ckpt-step 2 --override-opt-param-scheduler"
    for parallel in others:
        rest = train(4, f"{flags} {parallel} {load}", **common)[-1].losses
        assert rest == pytest.approx(whole[2:], rel=1e-5), parallel
