"""Packed documents with prediction and hybrid models: what ``cases.toml`` cannot say."""

from __future__ import annotations

import pytest
import torch
from feature_faults import PACKS, STRIPED, other_bounds_for_the_model
from megatron.core.packed_seq_params import PackedSeqParams
from training import SHORT, compare, short_documents, stock, train

from cp_plugin import ContextParallel
from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version, original

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"),
]


def test_experts_balance_each_sample_of_a_pack() -> None:
    """On one rank: two samples in a pack have the losses and gradients of two packs."""
    flags = f"{PACKS} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1"
    packed, alone = (
        stock(1, f"{flags} --micro-batch-size {size}", steps=2, prepare=short_documents) for size in (2, 1)
    )
    compare(packed, alone, steps=2)


def test_a_pack_of_unknown_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron then does not tell Mamba where states restart; the tokens after the last document are one more."""
    from cp_plugin.megatron.micro_batch import MicroBatch
    from cp_plugin.megatron.patches import hybrid

    alone = ContextParallel("ring", group=None)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 12]))
    assert packed.seq_idx is None
    monkeypatch.setattr(hybrid, "_batch", lambda tokens, size, packed: MicroBatch.find(alone, packed, tokens))
    hybrid.replace_undo(original(hybrid.REORDER))(torch.zeros(16, 1, 4), 2, packed)
    assert packed.seq_idx.tolist() == [5 * [1] + 7 * [2] + 4 * [3]]


def test_layouts_that_do_not_place_documents_do_not_depend_on_their_bounds() -> None:
    train(2, f"{STRIPED} {PACKS}", documents=SHORT, prepare=other_bounds_for_the_model)
