"""Trainings of the examples: Megatron's training loop in subprocesses, its log, and two runs compared.

They train from the same weights, with context parallelism and without, in float32 and by plain SGD, so that equal
gradients give equal losses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cp_plugin.tools.output import print_verdict

TOLERANCE = 1e-5
"""Largest relative difference of two losses in any iteration: float32 rounding in another order of summation."""
_LOSS = re.compile(r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+).*lm loss: (?P<loss>[-+.\dEena]+)")


class TrainingError(Exception):
    """A training run or the building of its dataset failed; the message has the last lines of output."""


class Iteration(NamedTuple):
    """One line of a training log."""

    loss: float
    milliseconds: float


Pair = tuple[list[Iteration], list[Iteration]]
"""The iterations on one rank and on several."""


def parse(parser: argparse.ArgumentParser, name: str, iterations: int = 40) -> argparse.Namespace:
    """Parse the command line of an example with the flags that all have, and make its folder."""
    number = {"metavar": "N", "type": int}
    parser.add_argument("--ranks", **number, default=4, help="context-parallel ranks (default: %(default)s)")
    parser.add_argument("--iterations", **number, default=iterations, help="training steps (default: %(default)s)")
    out, use = Path(__file__).resolve().parents[1] / "out" / name, "for data, logs and plot (default: %(default)s)"
    parser.add_argument("--out", metavar="DIR", type=Path, default=out, help=use)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    return chosen


def exit_with(main: Callable[[], int]) -> None:
    """Exit with the status of an example, or the message of a training run that failed."""
    try:
        sys.exit(main())
    except TrainingError as error:
        sys.exit(f"FAIL: {error}")


def dataset(prefix: Path, *words: object) -> list[str]:
    """Build a dataset with ``cp-plugin dataset``; return its training flags.

    Raises:
        TrainingError: if it cannot be built.
    """
    command = [sys.executable, "-W", "ignore", "-m", "cp_plugin.tools", "dataset", str(prefix), *map(str, words)]
    if status := subprocess.run(command, check=False).returncode:
        raise TrainingError(f"building the dataset {prefix} ended with status {status}")
    return json.loads(Path(f"{prefix}_text_document.json").read_text())["flags"]


def train(flags: Sequence[str], ranks: int, iterations: int, log: Path, *, quiet: bool = False) -> list[Iteration]:
    """Train on forked CPU ranks and write the log to a file; TrainingError if it fails."""
    command = [sys.executable, "-m", "cp_plugin.pretrain_gpt", "--nproc", str(ranks), "--train-iters", str(iterations)]
    columns = (TextColumn(f"training, {ranks} rank{'s' * (ranks > 1)}"), BarColumn(), MofNCompleteColumn())
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as file,
        Progress(*columns, TimeElapsedColumn(), TextColumn("{task.description}"), disable=quiet) as progress,
        subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as run,
    ):
        bar = progress.add_task("starting", total=iterations)
        assert run.stdout is not None
        for line in run.stdout:
            file.write(line)
            for loss in read_log(line):
                progress.update(bar, advance=1, description=f"loss {loss.loss:.4f}")
    if run.returncode:
        last = "\n".join(log.read_text().splitlines()[-40:])
        raise TrainingError(f"training with {ranks} ranks ended with status {run.returncode}:\n{last}")
    return read_log(log.read_text())


def read_log(text: str) -> list[Iteration]:
    """Read the iterations of a training log, in order."""
    return [Iteration(loss=float(m["loss"]), milliseconds=float(m["ms"])) for m in _LOSS.finditer(text)]


def difference(one: Iteration, many: Iteration) -> float:
    return abs(many.loss - one.loss) / abs(one.loss)


def largest(one: Sequence[Iteration], many: Sequence[Iteration]) -> float:
    """Return the largest relative difference of two runs."""
    return max(map(difference, one, many))


def verdict(runs: Mapping[str, Pair], iterations: int, passed: str) -> int:
    """Print whether each pair of runs has the same losses, which fall by at least 5 %; return the exit status."""
    problems = []
    for name, (one, many) in runs.items():
        off = [d for d in map(difference, one, many) if not d <= TOLERANCE]  # also NaN
        if not len(one) == len(many) == iterations:
            problems.append(f"{name}: {len(one)} and {len(many)} iterations were logged, not {iterations}")
        elif off:
            which = "1 loss differs" if len(off) == 1 else f"{len(off)} losses differ"
            problems.append(f"{name}: {which} by more than {TOLERANCE:.0e}, the first by {off[0]:.1e}")
        elif not one[-1].loss < 0.95 * one[0].loss:
            problems.append(f"{name}: the loss did not fall: {one[0].loss:.3f} to {one[-1].loss:.3f}")
    if not problems:
        passed += f" within {max(largest(*pair) for pair in runs.values()):.1e} (allowed {TOLERANCE:.0e})"
    print_verdict(not problems, "; ".join(problems) or passed)
    return 1 if problems else 0


def print_losses(console: Console, one: Sequence[Iteration], many: Sequence[Iteration], names: tuple[str, str]) -> None:
    """Print both runs side by side: the first iterations, then every fifth."""
    table = Table("iteration", f"loss {names[0]}", f"loss {names[1]}", "difference", "ms")
    for column in table.columns:
        column.justify = "right"
    shown = {0, 1, 2, *range(4, len(one), 5), len(one) - 1}
    for i, (a, b) in enumerate(zip(one, many, strict=False)):
        if i in shown:
            losses = (f"{a.loss:.6f}", f"{b.loss:.6f}", f"{difference(a, b):.1e}")
            table.add_row(str(i + 1), *losses, f"{a.milliseconds:.0f}, {b.milliseconds:.0f}")
    console.print(table)


def plot(path: Path, title: str, runs: Mapping[str, Pair], ranks: int) -> None:
    """Draw loss curves, wide and pale on one rank, thin on several, and their difference against the tolerance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for colour, (name, (one, many)) in zip(("#4477aa", "#228833", "#ee6677"), runs.items(), strict=False):
        steps = range(1, len(one) + 1)
        top.plot(steps, [i.loss for i in one], color=colour, linewidth=5, alpha=0.4, label=f"{name}, CP 1")
        top.plot(steps, [i.loss for i in many], color=colour, linewidth=1.5, label=f"{name}, CP {ranks}")
        differences = [max(difference(a, b), 1e-8) for a, b in zip(one, many, strict=True)]
        bottom.semilogy(steps, differences, ".", color=colour)
    bottom.axhline(TOLERANCE, color="#ee6677", linestyle=":", label="tolerance")
    top.set(ylabel="loss", title=title)
    bottom.set(xlabel="iteration", ylabel="relative difference\n(lowest: same digits)")
    for axes in (top, bottom):
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
