"""Sliding windows, softmax offsets and packed documents in Megatron: one rank's numbers.

Stock Megatron on one rank masks packed documents by a mask tensor of the batch, which restarts after each
end-of-document token. The mock corpus ends every document with one, so both sides see the same documents.
"""

from __future__ import annotations

from typing import Any

import parity
import pytest
from harness import MODEL
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


CASES = {
    "window in every second layer, learnable offset": (1, 2, f"{MIXED} {LEARNT}", "needed"),
    "window": (1, 4, WINDOW, "attention2d --cp-grid 2x2"),
    "window, head axis": (1, 4, WINDOW, "usp --cp-head-parallel 2 --cp-layout striped"),
    "offset of zero": (1, 4, "--softmax-type off-by-one", "burst"),
    "learnable offset, tensor parallel": (2, 4, f"{LEARNT} {TENSOR}", "ring --cp-layout zigzag"),
}
"""Ranks without context parallelism, context-parallel size, flags, provider."""


@one_case
@pytest.mark.parametrize("case", CASES)
def test_windows_and_offsets(case: str) -> None:
    ranks, cp, flags, provider = CASES[case]
    check(flags, provider, cp=cp, ranks=ranks)


PACKS = {
    "learned positions": (1, 2, "", "striped"),
    "needed": (1, 4, "", "needed"),
    "grid": (1, 4, "", "attention2d --cp-grid 2x2"),
    "head axis": (1, 4, "", "usp --cp-head-parallel 2"),
    "tensor and sequence parallel": (2, 4, f"{TENSOR} --sequence-parallel", "attention2d"),
    "pipeline": (2, 4, "--pipeline-model-parallel-size 2 --micro-batch-size 1", "attention2d"),
}


@one_case
@pytest.mark.parametrize("case", PACKS)
def test_packed_documents(case: str) -> None:
    ranks, cp, flags, provider = PACKS[case]
    model = LEARNED if case == "learned positions" else MODEL
    check(f"{PACKED} {flags}", provider, cp=cp, ranks=ranks, want=f"{RESET} {flags}", model=model)


@slow
def test_packed_documents_in_a_hybrid_of_linear_and_softmax_layers() -> None:
    flags = f"{PACKED} --cp-linear-attention gla --cp-layer-pattern LN"
    check(flags, "attention2d --cp-layout zigzag")
