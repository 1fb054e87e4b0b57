"""Packed documents: Megatron-LM's own training loop with CP 1 and with CP 4, each pack sharded by its documents.

    python examples/packed.py --iterations 40   in an environment with cp-plugin

The documents are one or more paragraphs of Python's manual: many short, few long, as in chat data. A token attends to
its own document only. The same small GPT is trained on one rank; on four that fetch only visible keys, with tokens
placed by document; and by a ring on zigzag tokens, which sends every key to every rank. The losses must agree.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import shlex
from itertools import cycle, islice
from pathlib import Path

import runs
from rich.console import Console

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 320 --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
    --micro-batch-size 1 --global-batch-size 2 --optimizer sgd --sgd-momentum 0 --lr 0.05 --lr-decay-style constant
    --clip-grad 1.0 --weight-decay 0 --seed 1234 --split 100,0,0
    --log-interval 1 --eval-iters 0 --eval-interval 1000000
    --calculate-per-token-loss --dataloader-inter-document-masking
""")
WAYS = {"placed": "--cp-provider needed --cp-layout documents", "ring": "--cp-provider ring --cp-layout zigzag"}
PARAGRAPHS = (1, 1, 2, 1, 3, 1, 1, 2, 1, 8)
"""Per document, repeated cyclically."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT on packed documents with CP 1 and with more.")
    chosen = runs.parse(parser, "packed", iterations=20)
    console = Console()

    data = [*corpus(chosen.out / "manual"), "--data-cache-path", str(chosen.out / "cache")]
    divided = ["--context-parallel-size", str(chosen.ranks)]
    by_way = {
        way: runs.train(
            [*FLAGS, *data, *divided, *flags.split()], chosen.ranks, chosen.iterations, chosen.out / f"{way}.log"
        )
        for way, flags in WAYS.items()
    }
    one = runs.train([*FLAGS, *data], 1, chosen.iterations, chosen.out / "one.log")
    runs.print_losses(console, one, by_way["placed"], ("CP 1", f"CP {chosen.ranks}"))
    passed = f"packs placed on {chosen.ranks} ranks train as on one: {len(one)} losses"
    return runs.verdict({way: (one, many) for way, many in by_way.items()}, chosen.iterations, passed)


def corpus(prefix: Path) -> list[str]:
    """Build a dataset of documents from Python's manual; return its training flags."""
    paragraphs = (part for topic in pydoc_data.topics.topics.values() for part in topic.split("\n\n") if part.strip())
    documents = (list(islice(paragraphs, count)) for count in cycle(PARAGRAPHS))
    lines = [json.dumps({"text": "\n\n".join(document)}) for document in iter(lambda: next(documents), [])]
    source = prefix.with_suffix(".jsonl")
    source.write_text("\n".join(lines))
    return runs.dataset(prefix, source)


if __name__ == "__main__":
    runs.exit_with(main)
