"""Packed documents with prediction and hybrid models: what ``cases.toml`` cannot say, and planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from state_space_kernels import STATES
from torch import Tensor
from training import PACKED, check, compare, short_documents, stock, train

from cp_plugin import ContextParallel
from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version, original
from cp_plugin.testing.launch import RankError

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"),
]

PACKS = f"{PACKED} --calculate-per-token-loss"


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


def _next_of_another_document() -> None:
    from cp_plugin.megatron.patches import mtp

    rolled = mtp._rolled
    mtp._rolled = lambda cp, x, dim, by, packed, fill=0: rolled(cp, x, dim, by, None, fill)


def test_the_self_check_finds_next_tokens_of_another_document() -> None:
    flags = f"--mtp-num-layers 1 --context-parallel-size 2 --cp-provider striped {PACKS}"
    with pytest.raises(RankError, match="differs from the step on one rank"):
        train(2, flags, prepare=_next_of_another_document)


def _states_go_on() -> None:
    from megatron.core.ssm import mamba_context_parallel as used

    undo = used._undo_attention_load_balancing

    def without_documents(x: Tensor, size: int, packed: PackedSeqParams | None = None) -> Tensor:
        ordered = undo(x, size, packed)
        if packed is not None:
            packed.seq_idx = None
        return ordered

    used._undo_attention_load_balancing = without_documents


def _reversed_order_of_a_pack() -> None:
    from megatron.core.ssm.gated_delta_net import common, gdn

    orders = common._build_thd_cp_a2a_perm
    for module in (common, gdn):  # gdn calls it
        module._build_thd_cp_a2a_perm = lambda *pack: orders(*pack)[::-1]


@pytest.mark.parametrize(
    ("flags", "plant"),
    [
        ("--mtp-num-layers 1", _next_of_another_document),
        (f"--hybrid-layer-pattern M* {STATES}", _states_go_on),
        (f"--hybrid-layer-pattern G* {STATES}", _reversed_order_of_a_pack),
    ],
    ids=["next token of another document", "state of the document before", "reversed order of a pack"],
)
def test_a_planted_fault_is_noticed(flags: str, plant: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match="gradient of"):
        check(f"{flags} {PACKS}", "--cp-provider striped --cp-selfcheck off", cp=2, prepare=plant)
