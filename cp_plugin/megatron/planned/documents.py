"""How long the documents are that a training packs, as far as that is known before it starts."""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.utils import get_blend_and_blend_per_split


class Packed(NamedTuple):
    """One pack, which stands for all."""

    lengths: tuple[int, ...]
    """Of its documents, in tokens."""
    prefix: str
    """The dataset that they are drawn from."""


def pack_of(args: argparse.Namespace, tokens: int) -> Packed | None:
    """A pack of so many tokens, drawn as ``--dataloader-inter-document-masking`` packs them: in random order, the last
    one cut. Of several datasets that are blended, the one with the greatest weight.

    Every rank draws the same. Lengths come from the ``.idx`` of the dataset.

    Returns:
        None where documents are not packed so, and where no ``.idx`` tells their lengths: made-up data,
        conversations (``--sft``), files that are not here.
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
    dataset = IndexedDataset(prefix)  # it unmaps its lengths when it goes
    rng, left, found = np.random.default_rng(0), tokens, []
    while left:
        found.append(min(left, max(1, int(dataset.sequence_lengths[rng.integers(len(dataset))]))))
        left -= found[-1]
    return Packed(tuple(found), prefix)
