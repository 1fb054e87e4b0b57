"""Digests of slices: what they see, and scripts that change a batch after it was sliced.

Planted faults are in ``test_planted_later``, clean trainings in ``test_recheck``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training import train

from cp_plugin.core import layout as layouts
from cp_plugin.placement.documents import get_layout
from cp_plugin.testing.launch import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("adapter")

STRIPED = "--context-parallel-size 2 --cp-provider striped --cp-check-every 1"
GENERATOR = torch.Generator().manual_seed(3)
ENTRIES = {
    "tokens": torch.randint(0, 1 << 17, (2, 64), generator=GENERATOR),
    "a loss mask": torch.rand(2, 64, generator=GENERATOR),
    "bfloat16": torch.rand(2, 64, generator=GENERATOR).bfloat16(),
    "bool": torch.rand(2, 64, generator=GENERATOR) > 0.5,
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_digests_of_ranks_add_up(name: str, layout: str) -> None:
    from cp_plugin.megatron.selfcheck.slices import digest

    whole, everywhere = ENTRIES[name], torch.arange(64)
    everyone = [get_layout(layout).positions(64, 4, rank) for rank in range(4)]
    assert torch.equal(sum(digest(whole[:, at], at) for at in everyone), digest(whole, everywhere))
    order = torch.randperm(64, generator=GENERATOR)
    assert torch.equal(digest(whole[:, order], order), digest(whole, everywhere))


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
    found = {digest(x, at).item() for x in (whole, *changed)}
    assert len(found) == len(changed) + 1


def _batches(change: Callable[[dict[str, Tensor]], Any], whole: bool) -> Callable[[], None]:
    """Change each batch: ``whole``: before slicing."""

    def prepare() -> None:
        from cp_plugin.megatron.models import gpt

        name = "_slice" if whole else "get_batch"
        make = getattr(gpt, name)

        def changed(*given: Any) -> dict[str, Any]:
            if whole:
                change(given[0])
            batch = make(*given)
            if not whole:
                change(batch)
            return batch

        setattr(gpt, name, changed)

    return prepare


def _forget_some(batch: dict[str, Tensor]) -> None:
    batch["labels"] = batch["labels"] // 2  # as on one rank


def test_a_script_that_changes_labels_trains(capfd: pytest.CaptureFixture[str]) -> None:
    train(2, STRIPED, steps=3, prepare=_batches(_forget_some, whole=False))
    lines = [line for line in capfd.readouterr().out.splitlines() if "does not compare" in line]
    assert lines == [
        "cp_plugin: --cp-check-every does not compare slices of labels, which in the first one are not those of the "
        "slice on rank 0, rank 1: the script may change them after slicing"
    ]


def _of_this_rank(batch: dict[str, Tensor]) -> None:
    from cp_plugin.megatron.state import STATE

    if os.environ["RANK"] == "1" and not STATE.trial:
        batch["tokens"] = batch["tokens"].flip(0)


def test_other_samples_on_a_rank_are_found() -> None:
    with pytest.raises(RankError, match="tokens of the first batch differ before slicing: rank 1 has other batches"):
        train(2, STRIPED, prepare=_batches(_of_this_rank, whole=True))


@pytest.mark.parametrize("other", range(3))
def test_the_rank_that_differs_is_named(other: int) -> None:
    """Also where it is the first, with which nobody agrees."""

    def rank() -> str:
        from cp_plugin.megatron.selfcheck.slices import BatchError, require_one_batch

        tokens = ENTRIES["tokens"].flip(0) if dist.get_rank() == other else ENTRIES["tokens"]
        with pytest.raises(BatchError) as found:
            require_one_batch({"tokens": tokens, "labels": ENTRIES["tokens"]}, dist.group.WORLD)
        return str(found.value)

    for text in run_ranks(rank, 3, init_process_group=True):
        assert text.startswith(f"tokens of the first batch differ before slicing: rank {other} has other batches")


def _of_this_rank_later(batch: dict[str, Tensor]) -> None:
    from cp_plugin.megatron.state import STATE

    if STATE.first_batch is None:
        _of_this_rank(batch)


def test_other_samples_after_the_first_batch_are_found() -> None:
    says = "in step [12], on the striped layout, tokens differ before slicing: other batches"
    with pytest.raises(RankError, match=says):
        train(2, STRIPED, steps=2, prepare=_batches(_of_this_rank_later, whole=True))
