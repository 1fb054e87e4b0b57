"""Packed documents with prediction and hybrid models: what ``cases.toml`` cannot say, and planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from nightly import slow
from state_space_kernels import STATES
from test_memory_features import OVERLAP, STEPS, same_losses
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
MIXED = f"--hybrid-layer-pattern MG*- {STATES}"


@slow
def test_the_distributed_optimizer() -> None:
    flags = f"{MIXED} {PACKS} {OVERLAP}"
    common = {"steps": STEPS, "prepare": short_documents}
    got = train(2, f"{flags} --context-parallel-size 2 --cp-provider striped", **common)
    same_losses(got, stock(1, flags, **common))


def test_experts_balance_each_sample_of_a_pack() -> None:
    """On one rank: two samples in a pack have the losses and gradients of two packs."""
    flags = f"{PACKS} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1"
    packed, alone = (
        stock(1, f"{flags} --micro-batch-size {size}", steps=2, prepare=short_documents) for size in (2, 1)
    )
    compare(packed, alone, steps=2)


def _data_as_megatrons_scripts_build_them() -> None:
    """For the first and the last stage only, also where documents are packed."""
    from megatron.core import mpu
    from megatron.training.utils import is_first_or_last_pipeline_stage as at_an_end

    from cp_plugin.megatron.models import gpt

    gpt._builds_data = lambda vp_stage: mpu.get_tensor_model_parallel_rank() == 0 and at_an_end(vp_stage)


@pytest.mark.parametrize(
    ("stages", "flags"),
    [
        (3, "--num-layers 3 --pipeline-model-parallel-size 3"),
        (2, "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
    ],
    ids=["three stages", "virtual stages"],
)
def test_stages_in_between_have_the_bounds_of_documents(stages: int, flags: str) -> None:
    """In a Megatron-LM checkout: 'NoneType' object is not an iterator, with one context-parallel rank, too."""
    as_theirs = {"prepare": _data_as_megatrons_scripts_build_them, "alone": _data_as_megatrons_scripts_build_them}
    check(f"{flags} --micro-batch-size 1 {PACKS}", "--cp-provider striped", cp=2, ranks=stages, **as_theirs)


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
