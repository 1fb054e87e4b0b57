"""Datasets in Megatron's own format, by Megatron's own writer: ``PREFIX.bin`` and ``PREFIX.idx``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

EOD = 256
"""End-of-document token where tokens are bytes."""


def write(prefix: str, documents: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Write documents, one sequence each; elements have 2 bytes if the vocabulary allows, else 4."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    with closing(builder.data_file):
        for ids in documents:
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")
