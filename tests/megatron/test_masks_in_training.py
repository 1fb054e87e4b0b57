"""Sliding windows, softmax offsets and packed documents in Megatron: context parallelism against none.

Stock Megatron on one rank knows windows and offsets, and packed documents as a mask in the batch, which a document's
last token sets back: the same documents here, since the mock corpus ends each with that token.
"""

from __future__ import annotations

import pytest
from harness import MODEL, SGD, train
from nightly import one_case, slow
from parity import compare

WINDOW = "--window-size 20,0"
MIXED = "--window-size 7,0 --window-attn-skip-freq 2"
LEARNT = "--softmax-type learnable"
PACKED = "--dataloader-inter-document-masking"
RESET = "--reset-position-ids --reset-attention-mask"
LEARNED = MODEL.replace("--position-embedding-type rope", "--position-embedding-type learned_absolute")


def short_documents() -> None:
    """Several documents in each sequence of 64 tokens."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.max_sequence_length = 40


def check(flags: str, provider: str, ranks: int = 4, beside: str = "", *, want: str = "", **run: str) -> None:
    one = train(ranks // 4, f"{want or flags} {beside}", prepare=short_documents, **run)
    got = train(
        ranks,
        f"--context-parallel-size 4 --cp-provider {provider} {flags} {beside}",
        prepare=short_documents,
        **run,
    )
    compare(got, one, steps=1)


@one_case
@pytest.mark.parametrize("provider", ["attention2d --cp-grid 2x2", "usp --cp-head-parallel 2 --cp-layout striped"])
@pytest.mark.parametrize("flags", [WINDOW, f"{MIXED} {LEARNT}"], ids=["window", "every second layer, learnt offset"])
def test_windows_and_offsets(flags: str, provider: str) -> None:
    check(flags, provider)


def test_offset_of_zero() -> None:
    check("--softmax-type off-by-one", "burst")


@slow
def test_learnt_offset_with_tensor_parallelism() -> None:
    check(LEARNT, "ring --cp-layout zigzag", 8, "--tensor-model-parallel-size 2")


@one_case
@pytest.mark.parametrize("provider", ["striped", "attention2d --cp-grid 2x2", "usp --cp-head-parallel 2"])
def test_packed_documents(provider: str) -> None:
    check(PACKED, provider, want=RESET)


def test_packed_documents_with_learned_positions() -> None:
    check(PACKED, "striped", want=RESET, model=LEARNED)


@slow
def test_packed_documents_with_tensor_and_sequence_parallelism() -> None:
    check(PACKED, "attention2d", 8, "--tensor-model-parallel-size 2 --sequence-parallel", want=RESET)


@slow
def test_packed_documents_in_a_pipeline() -> None:
    beside = "--pipeline-model-parallel-size 2"
    check(
        PACKED,
        "attention2d",
        8,
        beside,
        want=RESET,
        training=SGD.replace("--micro-batch-size 2", "--micro-batch-size 1"),
    )


@slow
def test_packed_documents_in_a_hybrid_of_linear_and_softmax_layers() -> None:
    flags = f"{PACKED} --cp-linear-attention gla --cp-layer-pattern LN --cp-provider attention2d --cp-layout zigzag"
    one, four = (train(n, f"{flags} --context-parallel-size {n}", prepare=short_documents) for n in (1, 4))
    compare(four, one, steps=1)
