"""Linear, hybrid and softmax attention: the quickstart's GPT three times, each with CP 4 against CP 1.

    python examples/hybrid.py                        in an environment with cp-plugin[plot]
    python examples/hybrid.py --variant lightning

All layers linear (LASP-2), every fourth with softmax attention (LASP-2H), all layers softmax: with the same corpus,
budget and sizes. One plot shows all loss curves; four ranks must reproduce the curves of one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quickstart import HERE, train
from rich.console import Console
from rich.table import Table

from cp_plugin.cli.examples import training
from cp_plugin.cli.examples.training import TOLERANCE, Iteration, TrainingError, corpus, largest

Runs = dict[str, tuple[list[Iteration], list[Iteration]]]
"""Model -> its iterations on one rank and on several."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Train linear, hybrid and softmax models, and compare CP 1 with CP 4.")
    parser.add_argument("--variant", default="basic", help="--cp-linear-attention of the linear layers (default basic)")
    parser.add_argument("--ranks", type=int, default=4, help="context-parallel ranks (default 4)")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "hybrid")
    chosen = parser.parse_args()
    console = Console()
    chosen.out.mkdir(parents=True, exist_ok=True)
    data = corpus(chosen.out / "stdlib")
    linear = ["--cp-linear-attention", chosen.variant]
    models = {
        f"{chosen.variant} (L)": (linear, linear),
        f"hybrid (LLLN, {chosen.variant})": ([*linear, "--cp-layer-pattern", "LLLN"],) * 2,
        "softmax (N)": ([], ["--cp-provider", "all_gather"]),
    }
    runs: Runs = {}
    for name, (alone, divided) in models.items():
        console.print(name, style="bold")
        mine = argparse.Namespace(**{**vars(chosen), "out": chosen.out / name.split()[0]})
        mine.out.mkdir(exist_ok=True)
        many = ["--context-parallel-size", str(chosen.ranks), *divided]
        runs[name] = train(mine, data, 1, alone), train(mine, data, chosen.ranks, many)
    show(console, runs)
    console.print(f"plot: {plot(runs, chosen)}", highlight=False, soft_wrap=True)
    return verdict(console, runs, chosen)


def show(console: Console, runs: Runs) -> None:
    table = Table("model", "first loss", "last loss", "largest difference")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, (one, many) in runs.items():
        worst = largest(one, many)
        table.add_row(name, f"{one[0].loss:.4f}", f"{one[-1].loss:.4f}", f"{worst:.1e}")
    console.print(table)


def plot(runs: Runs, chosen: argparse.Namespace) -> Path:
    """Loss curves, and their distance from the last model's: wide and pale for one rank, thin for several."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    base = [i.loss for i in list(runs.values())[-1][0]]
    for colour, (name, (one, many)) in zip(("#4477aa", "#228833", "#ee6677"), runs.items(), strict=True):
        steps = range(1, len(one) + 1)
        for run, label, style in (
            (one, f"{name}, CP 1", {"linewidth": 6, "alpha": 0.3}),
            (many, f"{name}, CP {chosen.ranks}", {"linewidth": 1.3}),
        ):
            losses = [i.loss for i in run]
            top.plot(steps, losses, color=colour, label=label, **style)
            bottom.plot(steps, [a - b for a, b in zip(losses, base, strict=True)], color=colour, **style)
    top.set(ylabel="loss", title="Linear, hybrid and softmax layers in the same GPT, same budget")
    top.legend(ncols=3, fontsize=8)
    bottom.set(xlabel="iteration", ylabel=f"loss above that of {list(runs)[-1]}")
    path = chosen.out / "losses.png"
    figure.savefig(path, dpi=110)
    return path


def verdict(console: Console, runs: Runs, chosen: argparse.Namespace) -> int:
    """Print the verdict; return the exit status."""
    problems = []
    for name, (one, many) in runs.items():
        problems += [f"{name}: {text}" for text in training.disagreements(one, many, chosen.iterations)]
        problems += [f"{name}: {text}" for text in training.not_falling(one)]
    worst = max(largest(one, many) for one, many in runs.values())
    passed = f"{len(runs)} models on {chosen.ranks} ranks equal one rank within {worst:.1e} (allowed {TOLERANCE:.0e})"
    return training.verdict(console, problems, passed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainingError as error:
        sys.exit(f"FAIL: {error}")
