"""Refuse datasets with more token ids than the model, before training.

Otherwise such a token fails in the middle of training, as an index error or an assertion in a CUDA kernel. The check
reads ``PREFIX.json``, which ``cp-plugin dataset`` writes; datasets without one pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from megatron.training.utils import get_blend_and_blend_per_split

from cp_plugin.megatron.compat import counts_end_of_document, megatron_version

_SIZED = ("NullTokenizer", "TikTokenizer")
"""Tokenizers whose vocabulary is as large as ``--vocab-size`` says."""


def check(args: argparse.Namespace) -> None:
    """ValueError for a dataset with more token ids than the model."""
    limit, flag = _limit(args)
    if limit is None:
        return
    for prefix in _prefixes(args):
        ids = _described(prefix)
        if ids is not None and ids > limit:
            raise ValueError(
                f"{flag}: the model has {limit} token ids, but the dataset {prefix} was built with {ids}: "
                f"{prefix}.json has the flags to train on it"
            )


def _limit(args: argparse.Namespace) -> tuple[int | None, str]:
    """The model's number of ids, and the flag that sets it; None where only the tokenizer knows."""
    if args.padded_vocab_size is not None:
        return args.padded_vocab_size, f"--padded-vocab-size {args.padded_vocab_size}"
    if args.vocab_size is None or args.tokenizer_type not in _SIZED:
        return None, ""
    on_top = args.tokenizer_type == "NullTokenizer" and not counts_end_of_document(megatron_version())
    return args.vocab_size + on_top, f"--vocab-size {args.vocab_size}"


def _prefixes(args: argparse.Namespace) -> Iterator[str]:
    together, of_splits = get_blend_and_blend_per_split(args)
    for blend in (together, *(of_splits or ())):
        if blend is not None:
            yield from blend[0]


def _described(prefix: str) -> int | None:
    """The vocabulary size in a dataset's description."""
    try:
        found = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
        return int(found["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
