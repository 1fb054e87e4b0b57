"""Datasets in Megatron's own format, by Megatron's own writer: ``PREFIX.bin`` and ``PREFIX.idx``."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

LONGEST = 2**31 - 1
"""Tokens of a document: its length is a 32-bit integer in the ``.idx``."""


def write(prefix: str, documents: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Write documents, one sequence each, in elements of 2 bytes where the vocabulary allows it, else of 4."""
    with _builder(prefix, vocabulary) as builder:
        for ids in documents:
            builder.add_document(ids, [len(ids)])


def join(prefix: str, parts: Iterable[str], vocabulary: int) -> None:
    """Write one dataset that has the documents of these, in their order."""
    gc.freeze()  # Megatron collects garbage after each part: without what is there now, which takes it 0.3 s
    try:
        with _builder(prefix, vocabulary) as builder:
            for part in parts:
                builder.add_index(part)
    finally:
        gc.unfreeze()


def element_bytes(vocabulary: int) -> int:
    """Of a token in the ``.bin``."""
    return np.dtype(DType.optimal_dtype(vocabulary)).itemsize


@contextmanager
def _builder(prefix: str, vocabulary: int) -> Iterator[IndexedDatasetBuilder]:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    with closing(builder.data_file):
        yield builder
        builder.finalize(f"{prefix}.idx")
