"""Linear, hybrid and softmax attention: the quickstart's GPT three times, each with CP 4 against CP 1.

    python examples/hybrid.py                        in an environment with cp-plugin[plot]
    python examples/hybrid.py --variant lightning

All layers linear (LASP-2), every fourth with softmax attention (LASP-2H), all layers softmax: with the same corpus,
budget and sizes. One plot shows all loss curves; four ranks must reproduce the curves of one.
"""

from __future__ import annotations

import argparse

import runs
from quickstart import CORPUS, train
from rich.console import Console
from runs import Pair

from cp_plugin.tools.output import print_table


def main() -> int:
    parser = argparse.ArgumentParser(description="Train linear, hybrid and softmax models, and compare CP 1 with CP 4.")
    parser.add_argument("--variant", default="basic", help="--cp-linear-attention of the linear layers (default basic)")
    chosen, console = runs.parse(parser, "hybrid"), Console()
    data = runs.dataset(chosen.out / "stdlib", *CORPUS)
    linear = ["--cp-linear-attention", chosen.variant]
    models = {
        f"{chosen.variant} (L)": (linear, linear),
        f"hybrid (LLLN, {chosen.variant})": ([*linear, "--cp-layer-pattern", "LLLN"],) * 2,
        "softmax (N)": ([], ["--cp-provider", "all_gather"]),
    }
    pairs: dict[str, Pair] = {}
    for name, (alone, divided) in models.items():
        console.print(name, style="bold")
        own = argparse.Namespace(**{**vars(chosen), "out": chosen.out / name.split()[0]})
        own.out.mkdir(exist_ok=True)
        many = ["--context-parallel-size", str(chosen.ranks), *divided]
        pairs[name] = train(own, data, 1, alone), train(own, data, chosen.ranks, many)
    rows = [
        ((name, f"{one[0].loss:.4f}", f"{one[-1].loss:.4f}", f"{runs.largest(one, many):.1e}"), "")
        for name, (one, many) in pairs.items()
    ]
    print_table(console, "Models", ("model", "first loss", "last loss", "largest difference"), rows)
    picture = chosen.out / "losses.png"
    runs.plot(picture, "Linear, hybrid and softmax layers in the same GPT, same budget", pairs, chosen.ranks)
    console.print(f"plot: {picture}", highlight=False, soft_wrap=True)
    return runs.verdict(pairs, chosen.iterations, f"{len(pairs)} models on {chosen.ranks} ranks equal one rank")


if __name__ == "__main__":
    runs.exit_with(main)
