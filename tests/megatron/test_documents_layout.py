"""``--cp-layout documents``: packs placed by their documents' lengths train as on one rank."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from harness import MODEL, train
from nightly import nightly, one_case, slow
from parity import check
from state_space_kernels import STATES
from test_masks_in_training import WINDOW
from test_memory_features import OVERLAP, STEPS, same_losses
from test_packed_models import HYBRID, INTERLEAVED, LATENT, PACKED, SEQUENCE, SPREAD, latent_alone, with_documents
from warm import megatrons_own_data

from cp_plugin import ContextParallel
from cp_plugin.common.versions import version_tuple
from cp_plugin.megatron.patches.patching import megatron_version
from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import RankError

pytestmark = [
    pytest.mark.usefixtures("adapter"),
    pytest.mark.skipif(version_tuple(megatron_version()) < (0, 19), reason="documents are packed since 0.19"),
]

PLACED = "--cp-layout documents"
CASES = {
    "needed": (1, 4, "--eval-interval 1 --eval-iters 1", "needed", MODEL),
    "padded": (1, 4, "--seq-length 57", "needed --cp-pad-sequence", MODEL),
    "a window, prediction, masked tokens": (
        1,
        2,
        f"{WINDOW} --mtp-num-layers 2 --eod-mask-loss",
        "burst",
        MODEL,
    ),
    "latent attention": (1, 4, f"--hybrid-layer-pattern M+-+ {STATES} {LATENT}", "needed", SPREAD),
    "linear layers": (1, 4, "--cp-linear-attention gla --cp-layer-pattern LN", "needed", MODEL),
    "linear layers alone": (1, 4, "--cp-linear-attention retention --cp-linear-provider lasp2", "", MODEL),
    "hybrid, experts, prediction, tensor parallel": (
        2,
        2,
        f"--hybrid-layer-pattern MG*E/M* --num-experts 4 {SEQUENCE} {STATES}",
        "needed",
        HYBRID,
    ),
    "hybrid, interleaved pipeline, recomputed": (
        2,
        2,
        f"--hybrid-layer-pattern {INTERLEAVED} {STATES}",
        "attention2d",
        HYBRID,
    ),
}


@one_case
@pytest.mark.parametrize("case", CASES)
def test_as_on_one_rank(case: str) -> None:
    ranks, cp, flags, provider, model = CASES[case]
    model = model.replace("--num-layers 2 ", "") if "hybrid" in flags else model
    divided = f"--cp-provider {provider} {PLACED}" if provider else PLACED
    alone = latent_alone if LATENT in flags else with_documents
    check(f"{flags} {PACKED}", divided, cp=cp, ranks=ranks, model=model, steps=3, prepare=with_documents, alone=alone)


@slow
@pytest.mark.parametrize("provider", [name for name in providers.names() if "documents" in providers.get(name).layouts])
def test_every_provider(provider: str) -> None:
    documents = {"prepare": with_documents, "alone": with_documents}
    check(f"{WINDOW} {PACKED}", f"--cp-provider {provider} {PLACED}", cp=4, **documents)


def _documents_of(longest: int) -> None:
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    megatrons_own_data()
    MockGPTLowLevelDataset.max_sequence_length = longest


@pytest.mark.parametrize(
    ("length", "longest"),
    [pytest.param(64, 4096, marks=slow), pytest.param(2048, 8, marks=nightly)],
    ids=["one", "500"],
)
def test_so_many_documents(length: int, longest: int) -> None:
    """A pack that is one document, and one of about 500."""
    prepare = partial(_documents_of, longest)
    flags = f"{PACKED} --micro-batch-size 1 --seq-length {length} --max-position-embeddings {length}"
    check(flags, f"--cp-provider needed {PLACED}", cp=2, prepare=prepare, alone=prepare)


@slow
def test_the_distributed_optimizer_and_checks_of_later_steps() -> None:
    divided = f"{OVERLAP} --context-parallel-size 2 --cp-provider needed {PLACED} --cp-check-every 1"
    got = train(2, f"{PACKED} {divided}", steps=STEPS, prepare=with_documents)
    same_losses(got, train(1, f"{PACKED} {OVERLAP}", steps=STEPS, prepare=with_documents))


FORGETFUL = {"attention": "on_pack", "batch": "_on_pack", "rope": "apply_rotary_pos_emb_thd", "prediction": "_rolled"}


def _unplaced(where: str) -> None:
    """One place ignores that the pack has a layout of its own."""
    from cp_plugin.megatron.patches import packing

    on_pack = packing.on_pack

    def forgetting(cp: ContextParallel, *pack: Any) -> ContextParallel:
        return cp if sys._getframe(1).f_code.co_name == FORGETFUL[where] else on_pack(cp, *pack)

    packing.on_pack = forgetting


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
    divided = f"--context-parallel-size 2 --cp-provider needed {PLACED} {PACKED}"
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

    with_documents()
    gpt._packed_seq_params = padded


@pytest.mark.parametrize("layout", ["documents", "striped"])
def test_a_batch_is_placed_by_the_bounds_that_the_model_has(layout: str) -> None:
    """Other layouts do not depend on them."""
    divided = f"--context-parallel-size 2 --cp-provider needed --cp-layout {layout} {PACKED}"
    wrong = pytest.raises(RankError, match=r"the model is given documents of .* by which no batch was sliced")
    with wrong if layout == "documents" else nullcontext():
        train(2, divided, prepare=_other_bounds_for_the_model)
