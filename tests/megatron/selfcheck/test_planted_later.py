"""Faults after the start-up self-check: they train without an error, unless ``--cp-check-every`` finds them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from fault_rows import ranks_of
from nightly import one_case
from rank_faults import Plant, plant
from state_space_kernels import STATES
from textbook import MLA, YARN
from training import MODEL, SGD, short_documents, train

from cp_plugin.testing.launch import RankError

pytestmark = pytest.mark.usefixtures("adapter")

ONE_CALL = MODEL.replace("--num-layers 2", "--num-layers 1").replace("--num-query-groups 2", "--num-query-groups 1")
"""A single attention call and key/value head per step, so that the check always draws it."""
ONE = SGD.replace("--micro-batch-size 2 --global-batch-size 4", "--micro-batch-size 1 --global-batch-size 1")
TWO = "--context-parallel-size 2 --cp-provider ring"
FOUR = "--context-parallel-size 4 --cp-provider ring"


DELTA = f"{MODEL} --hybrid-layer-pattern G* {STATES} --cp-linear-provider lasp2 --cp-layout zigzag"


class Later(NamedTuple):
    plant: Plant
    flags: str
    steps: int
    error: str
    """Pattern of the check's message."""
    model: str = ONE_CALL


def fault_step_3(at: str, do: str, error: str, flags: str = TWO, rank: int = 1) -> Later:
    """rank: for sums that come back 0, which has the keys that the other rank's queries see."""
    return Later(Plant(rank=rank, at=at, step=3, do=do), flags, 3, error)


def fault_delta_net(at: str, do: str, error: str) -> Later:
    """In a hybrid model, with the kernels of its layers in plain torch."""
    return fault_step_3(at, do, error)._replace(model=DELTA)


STEP_3 = "--cp-check-every 1: in step 3, "
ROWS = rf"{STEP_3}layer 1, .*\. rank 1: out of [1-8] of 8 rows"
SUMS = rf"{STEP_3}layer 1, .* gradients of ring attention .*sum\(%s\) ="
SLICES = rf"{STEP_3}on the \w+ layout, .*%s are not those of the slice on rank 1\."
TURNED = rf"{STEP_3}layer 1, .* queries or keys are not rotated by their positions\. rank 1: "
HALO = rf"{STEP_3}layer 1, .* halo of the short convolution's %s is not what was sent \(rank 1 from"
LATER = {
    "labels of another token": fault_step_3("batch", "roll:labels", SLICES % "labels"),
    "angles of the next token": fault_step_3("rotation", "turn:1", TURNED),
    "another softmax scale": fault_step_3("attention", "scale:1.2", ROWS),
    "remote dv": fault_step_3("returned", "smaller:dv", SUMS % "v . dv", rank=0),
    "keys of an earlier call": fault_step_3("received", "stale", ROWS),
    "a message of another step of the ring": Later(
        Plant(rank=2, at="received", step=3, do="late"), FOUR, 3, ROWS.replace(". rank 1", ".*rank 2")
    ),
    "swapped halos": fault_delta_net("halo", "flipped:halo", HALO % "forward"),
    "gradients of a halo": fault_delta_net("returned halo", "lost:halo", HALO % "backward"),
    "decays of the next tokens": fault_delta_net("linear", "flipped:log_decay", ROWS),
}


@pytest.mark.parametrize("name", LATER)
def test_the_check_in_training_finds_it(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as raised:
        _train(LATER[name], tmp_path, "--cp-check-every 1")
    text, printed = str(raised.value), capfd.readouterr().out
    assert "self-check passed" in printed, "the start-up check has found it"
    assert re.search(f"(Attention|Batch)Error: {LATER[name].error}", text) is not None, text
    assert len(re.findall(r"(?:^|: )(?:Attention|Batch)Error", text, re.MULTILINE)) >= 2, "on each rank of the group"


RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ROTATIONS = {
    "interleaved": (ONE_CALL, f"{TWO} --rotary-interleaved --bf16"),
    "of half a head": (ONE_CALL, f"{TWO} --rotary-percent 0.5"),
    "interpolated": (ONE_CALL, f"{TWO} --rotary-seq-len-interpolation-factor 2"),
    "scaled": (ONE_CALL, f"{TWO} --use-rope-scaling"),
    "recomputed": (ONE_CALL, f"{TWO} {RECOMPUTED}"),
    "YaRN": (
        ONE_CALL,
        f"{TWO} --position-embedding-type yarn --rotary-scaling-factor 4 "
        "--yarn-original-max-position-embeddings 16 --qk-l2-norm",
    ),
    "latent": (MLA, f"{TWO} --rope-type rope"),
    "latent, YaRN": (MLA, f"{TWO} {YARN}"),
    "latent, recomputed, documents": (MLA, f"{TWO} {RECOMPUTED} --dataloader-inter-document-masking"),
    "documents": (ONE_CALL, f"{TWO} --dataloader-inter-document-masking"),
}


@one_case
@pytest.mark.parametrize("name", ROTATIONS)
def test_every_form_of_rotation_is_compared(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, flags = ROTATIONS[name]
    later = fault_step_3("rotation", "turn:1", "", flags)
    with pytest.raises(RankError) as raised:
        _train(later, tmp_path, "--cp-check-every 1", model=model)
    assert "does not compare" not in capfd.readouterr().out
    assert re.search(f"AttentionError: {TURNED.replace('layer 1', 'layer [12]')}", str(raised.value)), str(raised.value)


def test_ranks_of_other_groups_are_ended_too(tmp_path: Path) -> None:
    """The second pipeline stage has another context-parallel group; its ranks are told by the alarm."""
    later = Later(Plant(rank=1, at="received", step=2, do="stale"), f"{TWO} --pipeline-model-parallel-size 2", 9, "")
    with pytest.raises(RankError) as raised:
        _train(later, tmp_path, "--cp-check-every 1", model=MODEL)
    text = str(raised.value)
    assert "rank 1 of 4" in text or "rank 0 of 4" in text
    assert "step 2, layer 1" in text
    for rank in (2, 3):  # told, at different places of their step, or cut off by a rank that was told before
        told = rf"(?:ranks 2-3|rank {rank}): no error|rank {rank}( of 4 on \S+)?: .*Connection (closed|reset) by peer"
        assert re.search(told, text), text


def _train(later: Later, tmp_path: Path, more: str, model: str = "") -> None:
    def prepare() -> None:
        if "--hybrid" in later.model:
            short_documents()
        plant(later.plant, tmp_path / "mark")

    flags = f"{later.flags} {more}"
    train(ranks_of(flags), flags, steps=later.steps, model=model or later.model, training=ONE, prepare=prepare)
