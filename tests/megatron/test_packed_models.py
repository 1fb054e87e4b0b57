"""Packed documents with multi-token prediction and in hybrid models: one rank's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import state_space_kernels
import torch
from harness import MODEL, train
from megatron.core.packed_seq_params import PackedSeqParams
from nightly import nightly, one_case, slow
from parity import check, compare, stock
from state_space_kernels import STATES
from test_masks_in_training import short_documents
from test_memory_features import OVERLAP, STEPS, same_losses
from test_mla import textbook
from torch import Tensor

from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version, original
from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import RankError

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"),
]

PACKED = "--dataloader-inter-document-masking --calculate-per-token-loss"
HYBRID = MODEL.replace("--num-layers 2 ", "")
LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 4 --v-head-dim 8"
SEQUENCE = "--tensor-model-parallel-size 2 --sequence-parallel"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SPREAD = MODEL.replace("--group-query-attention --num-query-groups 2 ", "")
INTERLEAVED = f"M*|G-|M*|*- --pipeline-model-parallel-size 2 --micro-batch-size 1 {RECOMPUTE}"
MIXED = f"MG*- {STATES}"


def with_documents() -> None:
    """Make documents end inside a pack, and state-space layers run on the CPU."""
    short_documents()
    state_space_kernels.install()


def latent_alone() -> None:
    """The same, and multi-latent attention, which Megatron does not have in plain torch."""
    with_documents()
    textbook()


def _compare(
    flags: str,
    cp: int,
    provider: str,
    *,
    ranks: int = 1,
    model: str = HYBRID,
    plant: Callable[[], None] = lambda: None,
    alone: Callable[[], None] = with_documents,
) -> None:
    def with_cp() -> None:
        with_documents()
        plant()

    divided = f"--cp-provider {provider}"
    check(f"{flags} {PACKED}", divided, cp=cp, ranks=ranks, model=model, prepare=with_cp, alone=alone)


CASES = {
    "Mamba, delta net": (1, 2, MIXED, "ring --cp-layout zigzag"),
    "Mamba, delta net, striped": (1, 4, f"*GM- {STATES}", "striped"),
    "Mamba, experts, prediction, tensor parallel": (
        2,
        2,
        f"M*E/M* --num-experts 4 {SEQUENCE} {STATES}",
        "attention2d --cp-layout contiguous",
    ),
    "pipeline, recomputed": (
        2,
        2,
        f"M*|GM*- --pipeline-model-parallel-size 2 --micro-batch-size 1 {RECOMPUTE} {STATES}",
        "striped",
    ),
    "prediction of two depths, masked tokens": (1, 2, f"M*-/*-/*- --eod-mask-loss {STATES}", "striped"),
    "interleaved pipeline, recomputed": (2, 2, f"{INTERLEAVED} {STATES}", "striped"),
    "eight ranks": (
        1,
        8,
        f"MG*- {STATES.replace('heads 4', 'heads 8')}",
        "attention2d --cp-grid 4x2 --cp-layout striped",
    ),
    "latent attention": (1, 2, f"M+-+ {STATES} {LATENT}", "striped"),
}


@one_case
@pytest.mark.parametrize("case", CASES)
def test_hybrid_models(case: str) -> None:
    ranks, cp, pattern, provider = CASES[case]
    latent = {"model": SPREAD.replace("--num-layers 2 ", ""), "alone": latent_alone} if LATENT in pattern else {}
    _compare(f"--hybrid-layer-pattern {pattern}", cp, provider, ranks=ranks, **latent)


@nightly
@pytest.mark.parametrize("provider", providers.names(kind="softmax"))
def test_every_provider(provider: str) -> None:
    _compare(f"--hybrid-layer-pattern {MIXED}", 4, provider)


@slow
def test_the_distributed_optimizer() -> None:
    flags = f"--hybrid-layer-pattern {MIXED} {PACKED} {OVERLAP}"
    common = {"steps": STEPS, "model": HYBRID, "prepare": with_documents}
    got = train(2, f"{flags} --context-parallel-size 2 --cp-provider striped", **common)
    same_losses(got, stock(1, flags, **common))


@one_case
@pytest.mark.parametrize(("cp", "provider"), [(2, "ring --cp-layout zigzag"), (4, "striped")])
def test_multi_token_prediction(cp: int, provider: str) -> None:
    _compare("--mtp-num-layers 2 --eod-mask-loss", cp, provider, model=MODEL)


def test_experts_balance_each_sample_of_a_pack() -> None:
    """On one rank: two samples in a pack have the losses and gradients of two packs."""
    flags = f"{PACKED} --num-experts 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1"
    packed, alone = (stock(1, f"{flags} --micro-batch-size {size}", steps=2, prepare=with_documents) for size in (2, 1))
    compare(packed, alone, steps=2)


def _data_as_megatrons_scripts_build_them() -> None:
    """For the first and the last stage only, also where documents are packed."""
    from megatron.core import mpu
    from megatron.training.utils import is_first_or_last_pipeline_stage as at_an_end

    from cp_plugin.megatron.models import gpt

    with_documents()
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
    _compare(
        f"{flags} --micro-batch-size 1",
        2,
        "striped",
        ranks=stages,
        plant=_data_as_megatrons_scripts_build_them,
        alone=_data_as_megatrons_scripts_build_them,
    )


def test_a_pack_of_unknown_length() -> None:
    """Megatron then does not tell Mamba where states restart; the tokens after the last document are one more."""
    from cp_plugin.megatron.patches import hybrid

    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 5, 12]))
    assert packed.seq_idx is None
    orders, hybrid._orders = hybrid._orders, lambda tokens, *where: hybrid._Orders(*2 * [torch.arange(tokens)])
    try:
        undo = hybrid.replace_undo(original(hybrid.REORDER))
        undo(torch.zeros(16, 1, 4), 2, packed)
    finally:
        hybrid._orders = orders
    assert packed.seq_idx.tolist() == [5 * [1] + 7 * [2] + 4 * [3]]


def _next_of_another_document() -> None:
    from cp_plugin.megatron.patches import mtp

    rolled = mtp._rolled
    mtp._rolled = lambda cp, x, dim, by, packed, fill=0: rolled(cp, x, dim, by, None, fill)


def test_the_self_check_finds_next_tokens_of_another_document() -> None:
    flags = f"--mtp-num-layers 1 --context-parallel-size 2 --cp-provider striped {PACKED}"
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
    ("flags", "model", "plant"),
    [
        ("--mtp-num-layers 1", MODEL, _next_of_another_document),
        (f"--hybrid-layer-pattern M* {STATES}", HYBRID, _states_go_on),
        (f"--hybrid-layer-pattern G* {STATES}", HYBRID, _reversed_order_of_a_pack),
    ],
    ids=["next token of another document", "state of the document before", "reversed order of a pack"],
)
def test_a_planted_fault_is_noticed(flags: str, model: str, plant: Callable[[], None]) -> None:
    with pytest.raises(AssertionError, match="gradient of"):
        _compare(flags, 2, "striped --cp-selfcheck off", model=model, plant=plant)
