"""The quickstart: Megatron-LM's own training loop, on real text, with CP 1 and with CP 4, on any machine.

    examples/quickstart.sh                          makes the environment, then runs this
    python examples/quickstart.py --provider ring   in an environment that has cp-plugin[plot]

It builds a Megatron dataset from the source text of Python's standard library, trains the same small GPT (RoPE,
RMSNorm, SwiGLU, grouped-query attention) twice from the same weights, and compares the losses. SGD in float32, so that
equal gradients give equal losses: Adam would divide rounding errors by their own size, and at twice this learning rate
training is unstable enough to make 3e-5 of them within 40 iterations.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5
"""Largest relative difference of the two losses in any iteration: float32 rounding, summed in another order."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One line of a training log."""

    loss: float
    milliseconds: float
    bytes: int = 0
    """Sent by rank 0 for context parallelism."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small GPT with CP 1 and with more, and compare the losses.")
    parser.add_argument("--provider", default="striped", help="--cp-provider to compare with CP 1 (default striped)")
    parser.add_argument("--ranks", type=int, default=4, help="context-parallel ranks (default 4)")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "quickstart")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    data = corpus(chosen.out / "stdlib")
    provider = ["--cp-provider", chosen.provider, "--cp-log-traffic"]
    many = train(chosen, data, chosen.ranks, ["--context-parallel-size", str(chosen.ranks), *provider])
    one = train(chosen, data, 1, [])  # last: a mistake in the flags shows in the other

    print_table(console, one, many, chosen.ranks)
    picture = plot(one, many, chosen)
    console.print(f"plot: {picture}\nlogs: {chosen.out}/cp*.log", highlight=False, soft_wrap=True)
    return verdict(console, one, many, chosen)


def corpus(prefix: Path) -> list[str]:
    """Build the dataset, and the flags to train on it."""
    command = [sys.executable, "-W", "ignore", HERE / "corpus.py", prefix, "--max-bytes", "4000000"]
    subprocess.run(command, check=True)
    return json.loads(Path(f"{prefix}_text_document.json").read_text())["flags"]


def train(chosen: argparse.Namespace, data: list[str], ranks: int, flags: list[str]) -> list[Iteration]:
    """One training run in processes of its own, with a progress bar; its log goes to ``cp<ranks>.log``."""
    command = [sys.executable, "-m", "cp_plugin.pretrain_gpt", "--nproc", str(ranks), *MODEL, *TRAINING, *data, *flags]
    command += ["--train-iters", str(chosen.iterations), "--data-cache-path", str(chosen.out / "cache")]
    columns = (TextColumn(f"training, {ranks} rank{'s' * (ranks > 1)}"), BarColumn(), MofNCompleteColumn())
    lines = []
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with (
        (chosen.out / f"cp{ranks}.log").open("w") as log,
        Progress(*columns, TimeElapsedColumn(), TextColumn("{task.description}")) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run,
    ):
        bar = progress.add_task("starting", total=chosen.iterations)
        assert run.stdout is not None
        for line in run.stdout:
            log.write(line)
            lines.append(line)
            if (loss := _LOSS.search(line)) is not None:
                progress.update(bar, advance=1, description=f"loss {float(loss['loss']):.4f}")
    if run.returncode:
        sys.exit(f"FAIL: training with {ranks} ranks ended with status {run.returncode}:\n" + "".join(lines[-40:]))
    return read_log("".join(lines))


_LOSS = re.compile(r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+).*lm loss: (?P<loss>[-+.\dEena]+)")
_BYTES = re.compile(r"bytes sent by rank 0 per iteration: (?P<bytes>[\d,]+)")


def read_log(text: str) -> list[Iteration]:
    """The iterations of a training log, in order."""
    sent = [int(match["bytes"].replace(",", "")) for match in _BYTES.finditer(text)]
    return [
        Iteration(loss=float(m["loss"]), milliseconds=float(m["ms"]), bytes=sent[i] if i < len(sent) else 0)
        for i, m in enumerate(_LOSS.finditer(text))
    ]


def difference(one: Iteration, many: Iteration) -> float:
    """Relative difference of two losses."""
    return abs(many.loss - one.loss) / abs(one.loss)


def print_table(console: Console, one: list[Iteration], many: list[Iteration], ranks: int) -> None:
    table = Table("iteration", "loss CP 1", f"loss CP {ranks}", "difference", "ms", "bytes per rank")
    for column in table.columns:
        column.justify = "right"
    shown = {0, 1, 2, *range(4, len(one), 5), len(one) - 1}
    for i, (a, b) in enumerate(zip(one, many, strict=False)):
        if i in shown:
            losses = (f"{a.loss:.6f}", f"{b.loss:.6f}", f"{difference(a, b):.1e}")
            table.add_row(str(i + 1), *losses, f"{a.milliseconds:.0f}, {b.milliseconds:.0f}", f"{b.bytes:,}")
    console.print(table)


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
    """The last line, and the exit status that goes with it."""
    problems = []
    if not len(one) == len(many) == chosen.iterations:
        problems.append(f"{len(one)} and {len(many)} iterations were logged, not {chosen.iterations}")
    differences = [difference(a, b) for a, b in zip(one, many, strict=False)]
    off = [d for d in differences if not d <= TOLERANCE]  # also NaN
    if off:
        problems.append(f"{len(off)} losses differ by more than {TOLERANCE:.0e}, the first by {off[0]:.1e}")
    if one and not one[-1].loss < 0.95 * one[0].loss:
        problems.append(f"the loss did not fall: {one[0].loss:.3f} to {one[-1].loss:.3f}")
    if not all(i.bytes > 0 for i in many):
        problems.append("no context-parallel traffic was reported")
    if problems:
        console.print(f"FAIL {'; '.join(problems)}", style="bold red", highlight=False, soft_wrap=True)
        return 1
    console.print(
        f"PASS {chosen.provider} on {chosen.ranks} ranks equals one rank: {len(one)} losses within "
        f"{max(differences):.1e} (allowed {TOLERANCE:.0e}), {one[0].loss:.2f} -> {one[-1].loss:.2f}",
        style="bold green",
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
