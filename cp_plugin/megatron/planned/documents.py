"""Document lengths of a training's packs, as far as known before it starts."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.utils import get_blend_and_blend_per_split


class Packed(NamedTuple):
    """A representative pack."""

    lengths: tuple[int, ...]
    """Tokens of its documents."""
    prefix: str
    """The dataset they are drawn from."""


def pack_of(args: argparse.Namespace, tokens: int) -> Packed | None:
    """Draw a pack as ``--dataloader-inter-document-masking`` does: in random order, the last document cut.

    Lengths come from the dataset's ``.idx``; of a blend, from the dataset with the greatest weight. Every rank draws
    the same pack.

    Returns:
        None for other data, or without an ``.idx``: mock data, conversations (``--sft``), missing files.
    """
    if not getattr(args, "dataloader_inter_document_masking", False) or args.mock_data:
        return None
    together, of_splits = get_blend_and_blend_per_split(args)
    blend = together or (of_splits and of_splits[0])
    if not blend:
        return None
    prefixes, weights = blend
    prefix = prefixes[int(np.argmax(weights)) if weights else 0]
    if not IndexedDataset.exists(prefix):
        return None
    dataset = IndexedDataset(prefix)  # keeps its lengths mapped
    rng, left, found = np.random.default_rng(0), tokens, []
    while left:
        found.append(min(left, max(1, int(dataset.sequence_lengths[rng.integers(len(dataset))]))))
        left -= found[-1]
    return Packed(tuple(found), prefix)
