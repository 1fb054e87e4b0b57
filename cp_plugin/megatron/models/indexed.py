"""Datasets in Megatron's own format, by Megatron's own writer: ``PREFIX.bin`` and ``PREFIX.idx``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

LONGEST = 2**31 - 1
"""Maximum tokens of a document: the ``.idx`` stores lengths as 32-bit integers."""


def write(prefix: str, documents: Iterable[Sequence[int]], vocabulary: int) -> None:
    """Write documents, one sequence each; elements have 2 bytes if the vocabulary allows, else 4."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=element_type(vocabulary))
    with closing(builder.data_file):
        for ids in documents:
            builder.add_document(ids, [len(ids)])
        builder.finalize(f"{prefix}.idx")


def element_type(vocabulary: int) -> type[np.number]:
    """The dtype of a token in the ``.bin``."""
    return DType.optimal_dtype(vocabulary)
