"""How a comparison changes with the sequence length and with the number of ranks: many small virtual clusters.

    python ci/cluster/sweep.py --scenario linear16 --seq 16384 --seq 65536 --seq 262144 --nodes 4 --nodes 8 --nodes 16

Sequence lengths are tried on the most ranks, numbers of ranks at the longest sequence. Prints a table and writes a plot
of how many times as fast the run is that should be, for each that it is compared with. Needs root, like ``run.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from bench import Measured, measure
from network import Network, command, require_cluster
from rich.console import Console
from rich.table import Table
from scenarios import SCENARIOS, Scenario, parse_rate

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One cluster."""

    nodes: int
    seq: int
    measured: Sequence[Measured]

    def ratio(self, fast: str, slow: str) -> float:
        """How many times as fast."""
        seconds = {m.entry: m.median for m in self.measured}
        return seconds[slow] / seconds[fast]


@app.command(help=__doc__)
def main(
    scenario: Annotated[str, typer.Option(help=f"one of {', '.join(SCENARIOS)}")],
    seq: Annotated[list[int], typer.Option(help="global tokens; repeat it")],
    nodes: Annotated[list[int], typer.Option(help="nodes; repeat it")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all figures to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="write the plot to this file")] = None,
) -> None:
    with command():
        if scenario not in SCENARIOS or not SCENARIOS[scenario].targets:
            raise ValueError(f"--scenario {scenario}: must be one with a target, such as linear16")
        require_cluster()
        chosen = SCENARIOS[scenario]
        wanted = {(max(nodes), s) for s in seq} | {(n, max(seq)) for n in nodes}
        points = [_point(replace(chosen, nodes=n, seq=s), rounds) for n, s in sorted(wanted)]
    _show(chosen, points)
    if json_file:
        json_file.write_text(json.dumps([_as_json(chosen, point) for point in points], indent=2))
    if plot:
        _plot(chosen, points, max(nodes), max(seq), plot)
    raise typer.Exit(not all(m.correct for point in points for m in point.measured))


def _point(scenario: Scenario, rounds: int) -> Point:
    with Network(scenario.topology(), parse_rate(scenario.rate)) as network:
        measured = measure(
            network, scenario.entries(), scenario.problem(), rounds=rounds, timeout=3600, apart=scenario.apart
        )
    return Point(nodes=scenario.nodes, seq=scenario.seq, measured=measured)


def _show(scenario: Scenario, points: Sequence[Point]) -> None:
    fast = scenario.targets[0].fast
    others = [target.slow for target in scenario.targets]
    table = Table("nodes", "tokens", f"{fast}, seconds", *(f"over {name}" for name in others))
    for p in points:
        seconds = next(m.median for m in p.measured if m.entry == fast)
        table.add_row(str(p.nodes), str(p.seq), f"{seconds:.3f}", *(f"{p.ratio(fast, o):.2f}x" for o in others))
    Console().print(table)


def _as_json(scenario: Scenario, point: Point) -> dict[str, object]:
    seconds = {m.entry: m.seconds for m in point.measured}
    return {"nodes": point.nodes, "seq": point.seq, "rate": scenario.rate, "seconds": seconds}


def _plot(scenario: Scenario, points: Sequence[Point], nodes: int, seq: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_length, by_ranks) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for target in scenario.targets:
        for axes, chosen, key in (
            (by_length, [p for p in points if p.nodes == nodes], "seq"),
            (by_ranks, [p for p in points if p.seq == seq], "nodes"),
        ):
            ratios = [p.ratio(target.fast, target.slow) for p in chosen]
            axes.plot([getattr(p, key) for p in chosen], ratios, "o-", label=f"{target.fast} over {target.slow}")
    for axes, label in ((by_length, f"tokens, {nodes} nodes"), (by_ranks, f"nodes, {seq} tokens")):
        axes.set(xlabel=label, xscale="log", yscale="log")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xticks(ticks := sorted({getattr(p, "seq" if axes is by_length else "nodes") for p in points}), ticks)
        axes.minorticks_off()
    by_length.set_ylabel("times as fast")
    by_length.legend()
    figure.savefig(path)


if __name__ == "__main__":
    app()
