"""The quickstart: Megatron-LM's own training loop on real text, with CP 1 and with CP 4, on any machine.

    examples/quickstart.sh                          creates an environment if none is active, then runs this
    python examples/quickstart.py --provider ring   in an environment with cp-plugin[plot]

It builds a Megatron dataset from the source text of Python's standard library, trains the same small GPT (RoPE,
RMSNorm, SwiGLU, grouped-query attention) twice from the same weights, and compares the losses. It uses SGD in float32,
so that equal gradients give equal losses: Adam would divide rounding errors by their own size, and twice this learning
rate is unstable enough to amplify them to 3e-5 within 40 iterations.
"""

from __future__ import annotations

import argparse
import shlex

import runs
from rich.console import Console
from runs import Iteration

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 640 --num-attention-heads 8
    --group-query-attention --num-query-groups 2 --seq-length 512 --max-position-embeddings 512
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
""")
TRAINING = shlex.split("""
    --micro-batch-size 2 --global-batch-size 4 --optimizer sgd --sgd-momentum 0 --lr 0.05 --lr-decay-style constant
    --clip-grad 1.0 --weight-decay 0 --seed 1234 --calculate-per-token-loss --split 100,0,0
    --log-interval 1 --eval-iters 0 --eval-interval 1000000
""")
CORPUS = ("--max-bytes", 4_000_000)
"""The first files of Python's standard library."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on one rank and on several, and compare the losses."
    )
    parser.add_argument("--provider", metavar="NAME", default="striped", help="--cp-provider (default: striped)")
    chosen = runs.parse(parser, "quickstart")
    console = Console()

    data = runs.dataset(chosen.out / "stdlib", *CORPUS)
    provider = ["--cp-provider", chosen.provider]
    many = train(chosen, data, chosen.ranks, ["--context-parallel-size", str(chosen.ranks), *provider])
    one = train(chosen, data, 1, [])  # last: mistakes in the flags show in the other

    runs.print_losses(console, one, many, ("CP 1", f"CP {chosen.ranks}"))
    both, picture = {chosen.provider: (one, many)}, chosen.out / "losses.png"
    title = "The same GPT, trained by Megatron-LM on the text of Python's standard library"
    runs.plot(picture, title, both, chosen.ranks)
    console.print(f"plot: {picture}\nlogs: {chosen.out}/cp*.log", highlight=False, soft_wrap=True)
    passed = f"{chosen.provider} on {chosen.ranks} ranks equals one rank: {len(one)} losses"
    return runs.verdict(both, chosen.iterations, passed)


def train(chosen: argparse.Namespace, data: list[str], ranks: int, flags: list[str]) -> list[Iteration]:
    """One training run, with a progress bar; its log goes to ``cp<ranks>.log``."""
    words = [*MODEL, *TRAINING, *data, *flags, "--data-cache-path", str(chosen.out / "cache")]
    return runs.train(words, ranks, chosen.iterations, chosen.out / f"cp{ranks}.log")


if __name__ == "__main__":
    runs.exit_with(main)
