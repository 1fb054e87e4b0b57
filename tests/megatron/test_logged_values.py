"""What Megatron logs of a step: the loss, router losses and those of multi-token prediction, as on one rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from nightly import one_case
from scripts import count_a_quarter
from test_contract import documents_are_packed
from training import MODEL, train

pytestmark = pytest.mark.usefixtures("adapter")

SHORT = MODEL.replace("--seq-length 64 ", "")
BALANCED = "--num-experts 4 --moe-z-loss-coeff 0.1 --moe-aux-loss-coeff"
LISTS = "--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss --moe-router-topk 2"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
PADDED = "--cp-provider striped --cp-pad-sequence"
CONTIGUOUS = "--cp-provider ring --cp-layout contiguous"
CASES = {
    "a rank of padding only": (1, 4, f"--seq-length 9 {BALANCED} 0.1", f"{CONTIGUOUS} --cp-pad-sequence"),
    "all router losses": (1, 2, f"--seq-length 57 {BALANCED} 0.1 0.1 0.1 {LISTS}", PADDED),
    "sequence parallel": (2, 2, f"--seq-length 58 {BALANCED} 0.1 {SEQUENCE}", PADDED),
    "experts, prediction, recomputed": (
        1,
        2,
        f"--seq-length 57 {BALANCED} 0.1 --mtp-num-layers 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        PADDED,
    ),
    "without padding": (1, 2, f"--seq-length 64 {BALANCED} 0.1 0.1 0.1 {LISTS} --mtp-num-layers 1", CONTIGUOUS),
}
"""Ranks without context parallelism, context-parallel size, flags of the model, flags of context parallelism."""


def _logged_into(file: Path) -> Callable[[], None]:
    """Every rank's preparation: the last rank's lines go to a file."""

    def prepare() -> None:
        from megatron.training import training

        def write(text: str) -> None:
            if dist.get_rank() == dist.get_world_size() - 1:
                file.write_text(f"{file.read_text() if file.exists() else ''}{text}\n")

        training.print_rank_last = write
        count_a_quarter()

    return prepare


def _logged(text: str) -> list[dict[str, float]]:
    """Losses and rates, by step."""
    found = [
        re.findall(r"\| ([\w ]*(?:loss|rate)): (\S+)", line) for line in text.splitlines() if " iteration " in line
    ]
    return [{name: float(value) for name, value in values if name != "learning rate"} for values in found]


@documents_are_packed  # since 0.19 losses of experts are right, too
@one_case
@pytest.mark.parametrize("case", CASES)
def test_logs_are_those_of_one_rank(case: str, tmp_path: Path) -> None:
    """Means of ranks were averaged, however few of their tokens counted."""
    ranks, size, flags, divided = CASES[case]
    flags += " --calculate-per-token-loss"
    logs = []
    for name, more in (("alone", ""), ("together", f"--context-parallel-size {size} {divided}")):
        prepare = _logged_into(tmp_path / name)
        train(ranks * (size if more else 1), f"{flags} {more}", steps=2, model=SHORT, prepare=prepare)
        logs.append(_logged((tmp_path / name).read_text()))
    assert [len(log) for log in logs] == [2, 2]
    for one, other in zip(*logs, strict=True):
        assert len(one) >= 3 and one.keys() == other.keys()
        wrong = {name: (one[name], other[name]) for name in one if abs(other[name] - one[name]) > 2e-5 * abs(one[name])}
        assert not wrong, wrong
