"""Run Megatron's own training loop on forked CPU ranks, and record what it computed."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

from recording import Record, record_into

from cp_plugin.testing.launch import run_ranks

MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 64 --max-position-embeddings 64 --attention-dropout 0 "
    "--hidden-dropout 0"
)
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0"
SGD = (
    "--micro-batch-size 2 --global-batch-size 4 --lr 0.05 --lr-decay-style constant --optimizer sgd --sgd-momentum 0 "
    "--weight-decay 0 --clip-grad 0 --log-interval 1 --eval-iters 0 --eval-interval 1000"
)
SCRIPT = os.environ.get("CP_PLUGIN_TEST_SCRIPT")
"""A training script to use instead of the plugin's own; for example a Megatron-LM checkout's pretrain_gpt.py."""


def train(
    ranks: int,
    flags: str = "",
    *,
    steps: int = 1,
    model: str = MODEL,
    training: str = SGD,
    timeout: float = 300.0,
    rank_flags: Sequence[str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> list[Record]:
    """Train on ``ranks`` forked processes with the plugin active, and return every rank's record.

    rank_flags: more flags for each rank alone, to start ranks that disagree.
    prepare: called on every rank when the provider's patches are in place, before anything uses them.
    """
    words = f"{model} {DATA} {training} --train-iters {steps} {flags}".split()
    records = run_ranks(_train_rank, ranks, args=(words, rank_flags, prepare), timeout=timeout)
    assert all(isinstance(record, Record) for record in records), "a rank left early"
    return records


def _train_rank(words: list[str], rank_flags: Sequence[str] | None, prepare: Callable[[], None] | None) -> Record:
    if rank_flags is not None:
        words = [*words, *rank_flags[int(os.environ["RANK"])].split()]
    from cp_plugin.megatron import activate

    sys.argv = ["pretrain_gpt.py", *words]
    activate()
    from cp_plugin import pretrain_gpt

    if prepare is not None:
        _after_start(prepare)
    record = Record()
    record_into(record)
    if SCRIPT is not None:
        sys.path.insert(0, os.path.dirname(SCRIPT))
        runpy.run_path(SCRIPT, run_name="__main__")
    else:
        pretrain_gpt.main()
    return record


def _after_start(prepare: Callable[[], None]) -> None:
    from cp_plugin.megatron.patches import hooks

    start = hooks.start

    def start_and_prepare(*settings: Any) -> None:
        start(*settings)
        prepare()

    hooks.start = start_and_prepare
