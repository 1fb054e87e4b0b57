"""Digests of slices: what they see, and scripts that change a batch after it was sliced.

Planted faults are in ``feature_faults`` and ``test_planted_later``, clean training runs in ``test_recheck``.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from feature_faults import STRIPED, change_slices
from torch import Tensor
from training import train

from cp_plugin.testing.launch import run_ranks

pytestmark = pytest.mark.usefixtures("adapter")

GENERATOR = torch.Generator().manual_seed(3)
ENTRIES = {
    "tokens": torch.randint(0, 1 << 17, (2, 64), generator=GENERATOR),
    "a loss mask": torch.rand(2, 64, generator=GENERATOR),
    "bfloat16": torch.rand(2, 64, generator=GENERATOR).bfloat16(),
    "bool": torch.rand(2, 64, generator=GENERATOR) > 0.5,
}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_change_is_seen(name: str) -> None:
    from cp_plugin.megatron.selfcheck.slices import digest

    whole, at = ENTRIES[name], torch.arange(64)
    changed = [whole.roll(by, dim) for by, dim in ((1, 1), (-1, 1), (1, 0))] + [whole.flip(1)]
    for row in range(2):
        for token in range(64):
            one = whole.clone()
            one[row, token] = ~one[row, token] if one.dtype == torch.bool else one[row, token] + 1
            changed.append(one)
    digests = {digest(x, at).item() for x in (whole, *changed)}
    assert len(digests) == len(changed) + 1


def forget_some(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"] // 2  # as on one rank


def test_a_script_that_changes_labels_trains(capfd: pytest.CaptureFixture[str]) -> None:
    train(2, f"{STRIPED} --cp-check-every 1", steps=2, prepare=change_slices(forget_some, ""))
    lines = [line for line in capfd.readouterr().out.splitlines() if "does not compare" in line]
    assert lines == [
        "cp_plugin: --cp-check-every does not compare slices of labels, which in the first one are not those of the "
        "slice on rank 0, rank 1: the script may change them after slicing"
    ]


def test_the_rank_that_differs_is_named() -> None:
    """Also where it is the first, with which nobody agrees."""

    def rank() -> list[str]:
        from cp_plugin.megatron.selfcheck.slices import BatchError, require_one_batch

        said = []
        for other in range(3):
            tokens = ENTRIES["tokens"].flip(0) if dist.get_rank() == other else ENTRIES["tokens"]
            with pytest.raises(BatchError) as raised:
                require_one_batch({"tokens": tokens, "labels": ENTRIES["tokens"]}, dist.group.WORLD)
            said.append(str(raised.value))
        return said

    for texts in run_ranks(rank, 3, init_process_group=True):
        for other, text in enumerate(texts):
            assert text.startswith(f"tokens of the first batch differ before slicing: rank {other} has other batches")
