"""Sliding windows, softmax offsets and packed documents in Megatron: context parallelism against none.

Stock Megatron on one rank knows windows and offsets, and packed documents as a mask in the batch, which a document's
last token sets back: the same documents here, since the mock corpus ends each with that token.
"""

from __future__ import annotations

from typing import Any

import parity
import pytest
from harness import MODEL, SGD
from nightly import one_case, slow

TENSOR = "--tensor-model-parallel-size 2"
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


def check(flags: str, provider: str, **more: Any) -> None:
    documents = {"prepare": short_documents, "alone": short_documents}
    parity.check(flags, f"--cp-provider {provider}", steps=1, **documents, **more)


@one_case
@pytest.mark.parametrize(
    "provider", ["needed", "attention2d --cp-grid 2x2", "usp --cp-head-parallel 2 --cp-layout striped"]
)
@pytest.mark.parametrize("flags", [f"{MIXED} {LEARNT}", WINDOW], ids=["every second layer, learnt offset", "window"])
def test_windows_and_offsets(flags: str, provider: str) -> None:
    check(flags, provider)


def test_offset_of_zero() -> None:
    check("--softmax-type off-by-one", "burst")


@slow
def test_learnt_offset_with_tensor_parallelism() -> None:
    check(f"{LEARNT} {TENSOR}", "ring --cp-layout zigzag", ranks=2)


@one_case
@pytest.mark.parametrize("provider", ["needed", "striped", "attention2d --cp-grid 2x2", "usp --cp-head-parallel 2"])
def test_packed_documents(provider: str) -> None:
    check(PACKED, provider, want=RESET)


def test_packed_documents_with_learned_positions() -> None:
    check(PACKED, "striped", want=RESET, model=LEARNED)


@slow
def test_packed_documents_with_tensor_and_sequence_parallelism() -> None:
    beside = f"{TENSOR} --sequence-parallel"
    check(f"{PACKED} {beside}", "attention2d", ranks=2, want=f"{RESET} {beside}")


@slow
def test_packed_documents_in_a_pipeline() -> None:
    beside = "--pipeline-model-parallel-size 2"
    training = SGD.replace("--micro-batch-size 2", "--micro-batch-size 1")
    check(f"{PACKED} {beside}", "attention2d", ranks=2, want=f"{RESET} {beside}", training=training)


@slow
def test_packed_documents_in_a_hybrid_of_linear_and_softmax_layers() -> None:
    flags = f"{PACKED} --cp-linear-attention gla --cp-layer-pattern LN --cp-provider attention2d --cp-layout zigzag"
    parity.check(flags, "", steps=1, prepare=short_documents, alone=short_documents)
