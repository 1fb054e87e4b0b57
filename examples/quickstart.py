"""The quickstart: Megatron-LM's own training loop on real text, with CP 1 and with CP 4, on any machine.

    examples/quickstart.sh                          creates the environment, then runs this
    python examples/quickstart.py --provider ring   in an environment with cp-plugin[plot]

It builds a Megatron dataset from the source text of Python's standard library, trains the same small GPT (RoPE,
RMSNorm, SwiGLU, grouped-query attention) twice from the same weights, and compares the losses. It uses SGD in float32,
so that equal gradients give equal losses: Adam would divide rounding errors by their own size, and twice this learning
rate is unstable enough to amplify them to 3e-5 within 40 iterations.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console

from cp_plugin.cli.examples import training
from cp_plugin.cli.examples.training import TOLERANCE, Iteration, TrainingError, corpus, difference

HERE = Path(__file__).resolve().parent

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


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on one rank and on several, and compare the losses."
    )
    parser.add_argument("--provider", metavar="NAME", default="striped", help="--cp-provider (default: striped)")
    parser.add_argument("--ranks", metavar="N", type=int, default=4, help="context-parallel ranks (default: 4)")
    parser.add_argument("--iterations", metavar="N", type=int, default=40, help="training steps (default: 40)")
    out = HERE.parent / "out" / "quickstart"
    parser.add_argument(
        "--out", metavar="DIR", type=Path, default=out, help="for data, logs and plot (default: %(default)s)"
    )
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    data = corpus(chosen.out / "stdlib")
    provider = ["--cp-provider", chosen.provider]
    saved = chosen.out / "checkpoint"
    shutil.rmtree(saved, ignore_errors=True)
    keep = ["--save", str(saved), "--save-interval", str(chosen.iterations), "--ckpt-format", "torch_dist"]
    many = train(chosen, data, chosen.ranks, ["--context-parallel-size", str(chosen.ranks), *provider, *keep])
    one = train(chosen, data, 1, [])  # last: mistakes in the flags show in the other

    training.print_losses(console, one, many, ("CP 1", f"CP {chosen.ranks}"))
    picture = plot(one, many, chosen)
    console.print(f"plot: {picture}\nlogs: {chosen.out}/cp*.log", highlight=False, soft_wrap=True)
    ask = f'cp-plugin generate --load {saved} --bytes --prompt "def main" --ranks {chosen.ranks}'
    console.print(f"generate text: {ask}", markup=False, highlight=False, soft_wrap=True)
    return verdict(console, one, many, chosen)


def train(chosen: argparse.Namespace, data: list[str], ranks: int, flags: list[str]) -> list[Iteration]:
    """One training run, with a progress bar; its log goes to ``cp<ranks>.log``."""
    words = [*MODEL, *TRAINING, *data, *flags, "--data-cache-path", str(chosen.out / "cache")]
    return training.train(words, ranks, chosen.iterations, chosen.out / f"cp{ranks}.log")


def plot(one: list[Iteration], many: list[Iteration], chosen: argparse.Namespace) -> Path:
    """Both loss curves, and their difference against the tolerance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(one) + 1)
    top.plot(steps, [i.loss for i in one], color="#4477aa", linewidth=5, alpha=0.5, label="CP 1")
    label = f"CP {chosen.ranks}, {chosen.provider}"
    top.plot(steps, [i.loss for i in many], color="#ee6677", linewidth=1.5, label=label)
    top.set(ylabel="loss", title="The same GPT, trained by Megatron-LM on the text of Python's standard library")
    top.legend()
    bottom.semilogy(steps, [max(difference(a, b), 1e-8) for a, b in zip(one, many, strict=True)], ".", color="black")
    bottom.axhline(TOLERANCE, color="#ee6677", linestyle=":", label="tolerance")
    bottom.set(xlabel="iteration", ylabel="relative difference\n(lowest: same digits)")
    bottom.legend()
    path = chosen.out / "losses.png"
    figure.savefig(path, dpi=110)
    return path


def verdict(console: Console, one: list[Iteration], many: list[Iteration], chosen: argparse.Namespace) -> int:
    """Print the verdict; return the exit status."""
    problems = [*training.disagreements(one, many, chosen.iterations), *training.not_falling(one)]
    if problems:
        return training.verdict(console, problems, "")
    passed = (
        f"{chosen.provider} on {chosen.ranks} ranks equals one rank: {len(one)} losses within "
        f"{training.largest(one, many):.1e} (allowed {TOLERANCE:.0e}), {one[0].loss:.2f} -> {one[-1].loss:.2f}"
    )
    return training.verdict(console, problems, passed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainingError as error:
        sys.exit(f"FAIL: {error}")
