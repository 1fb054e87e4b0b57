"""``--cp-layout documents``: many documents, later steps, and planted faults."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from nightly import slow
from test_packed_models import PACKS
from training import short_documents, train

from cp_plugin import ContextParallel
from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version
from cp_plugin.testing.launch import RankError

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"),
]

PLACED = "--cp-layout documents"


FORGETFUL = {"attention": "attended", "batch": "cut", "rope": "replace_apply_rotary_thd", "prediction": "_rolled"}


def _unplaced(where: str) -> None:
    """One place ignores that the pack has a layout of its own."""
    from cp_plugin.megatron.micro_batch import MicroBatch

    find = MicroBatch.find

    def forgetting(cp: ContextParallel, *pack: Any) -> MicroBatch:
        found = find(cp, *pack)
        return replace(found, cp=cp) if sys._getframe(1).f_code.co_name == FORGETFUL[where] else found

    MicroBatch.find = forgetting  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("where", "flags", "found"),
    [
        ("attention", "", "packed out is off by"),
        ("batch", "", "differs from the step on one rank"),
        pytest.param("rope", "", "differs from the step on one rank", marks=slow),
        ("prediction", "--mtp-num-layers 1", "differs from the step on one rank"),
    ],
)
def test_the_self_check_finds_what_is_not_placed(where: str, flags: str, found: str) -> None:
    divided = f"--context-parallel-size 2 --cp-provider needed {PLACED} {PACKS}"
    with pytest.raises(RankError, match=found):
        train(2, f"{flags} {divided}", prepare=partial(_unplaced, where))


def _other_bounds_for_the_model() -> None:
    """The script slices by the documents' bounds, and gives the model those with padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from cp_plugin.megatron.models import gpt

    def padded(batch: dict[str, Any]) -> PackedSeqParams:
        wide = (batch["cu_seqlens"].squeeze(0) + 7) // 8 * 8
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=wide, cu_seqlens_kv=wide, max_seqlen_q=64, max_seqlen_kv=64
        )

    short_documents()
    gpt._packed_seq_params = padded


@pytest.mark.parametrize("layout", ["documents", "striped"])
def test_a_batch_is_placed_by_the_bounds_that_the_model_has(layout: str) -> None:
    """Other layouts do not depend on them."""
    divided = f"--context-parallel-size 2 --cp-provider needed --cp-layout {layout} {PACKS}"
    wrong = pytest.raises(RankError, match=r"the model is given documents of .* by which no batch was sliced")
    with wrong if layout == "documents" else nullcontext():
        train(2, divided, prepare=_other_bounds_for_the_model)
