"""Run Megatron's training loop in a subprocess with a progress bar, parse its log, and compare losses.

Examples train twice from the same weights, with context parallelism and without, in float32 and by plain SGD, so that
equal gradients give equal losses.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cp_plugin.cli.terminal import print_verdict

TOLERANCE = 1e-5
"""Largest relative difference of two losses in any iteration: float32 rounding in another order of summation."""
_LAST_LINES = 40
_LOSS = re.compile(r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+).*lm loss: (?P<loss>[-+.\dEena]+)")


class TrainingError(Exception):
    """A training or the building of its dataset failed; the message has the last lines of output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One line of a training log."""

    loss: float
    milliseconds: float


def corpus(prefix: Path, max_bytes: int = 4_000_000, *, quiet: bool = False) -> list[str]:
    """Build a dataset from the first files of Python's standard library, unless it exists; return its training flags.

    Raises:
        TrainingError: if it cannot be built.
    """
    words = ["-W", "ignore", "-m", "cp_plugin.cli", "dataset", prefix, "--max-bytes", max_bytes]
    out = subprocess.DEVNULL if quiet else None
    made = subprocess.run([sys.executable, *map(str, words)], check=False, stdout=out)
    if made.returncode:
        raise TrainingError(f"building the dataset {prefix} ended with status {made.returncode}")
    return json.loads(Path(f"{prefix}_text_document.json").read_text())["flags"]


def train(flags: Sequence[str], ranks: int, iterations: int, log: Path, *, quiet: bool = False) -> list[Iteration]:
    """Train on forked CPU ranks and write the log to a file; TrainingError if it fails."""
    command = [sys.executable, "-m", "cp_plugin.pretrain_gpt", "--nproc", str(ranks), *flags]
    command += ["--train-iters", str(iterations)]
    columns = (TextColumn(f"training, {ranks} rank{'s' * (ranks > 1)}"), BarColumn(), MofNCompleteColumn())
    lines = []
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    with (
        log.open("w") as file,
        Progress(*columns, TimeElapsedColumn(), TextColumn("{task.description}"), disable=quiet) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run,
    ):
        bar = progress.add_task("starting", total=iterations)
        assert run.stdout is not None
        for line in run.stdout:
            file.write(line)
            lines.append(line)
            if (loss := _LOSS.search(line)) is not None:
                progress.update(bar, advance=1, description=f"loss {float(loss['loss']):.4f}")
    if run.returncode:
        last = "".join(lines[-_LAST_LINES:])
        raise TrainingError(f"training with {ranks} ranks ended with status {run.returncode}:\n{last}")
    return read_log("".join(lines))


def read_log(text: str) -> list[Iteration]:
    """The iterations of a training log, in order."""
    return [Iteration(loss=float(m["loss"]), milliseconds=float(m["ms"])) for m in _LOSS.finditer(text)]


def difference(one: Iteration, many: Iteration) -> float:
    return abs(many.loss - one.loss) / abs(one.loss)


def largest(one: Sequence[Iteration], many: Sequence[Iteration]) -> float:
    """The largest relative difference of two runs; 0 if there is nothing to compare."""
    return max(map(difference, one, many), default=0.0)


def disagreements(
    one: Sequence[Iteration], many: Sequence[Iteration], iterations: int, tolerance: float = TOLERANCE
) -> list[str]:
    """How two runs differ that should be equal."""
    found = []
    if not len(one) == len(many) == iterations:
        found.append(f"{len(one)} and {len(many)} iterations were logged, not {iterations}")
    off = [d for d in map(difference, one, many) if not d <= tolerance]  # also NaN
    if off:
        which = "1 loss differs" if len(off) == 1 else f"{len(off)} losses differ"
        found.append(f"{which} by more than {tolerance:.0e}, the first by {off[0]:.1e}")
    return found


def not_falling(one: Sequence[Iteration]) -> list[str]:
    """A complaint if the loss did not fall by at least 5 %."""
    if not one or one[-1].loss < 0.95 * one[0].loss:
        return []
    return [f"the loss did not fall: {one[0].loss:.3f} to {one[-1].loss:.3f}"]


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


def verdict(console: Console, problems: Sequence[str], passed: str) -> int:
    """Print the last line and return the exit status."""
    print_verdict(not problems, "; ".join(problems) or passed, console)
    return 1 if problems else 0
