"""A comparison over sequence lengths and numbers of ranks: many small virtual clusters. Needs root, like ``run.py``.

    python ci/cluster/sweep.py --scenario linear16 --seq 16384 --seq 65536 --seq 262144 --nodes 4 --nodes 8 --nodes 16

Sequence lengths are measured on the most ranks, numbers of ranks at the longest sequence. The table has the speed of
the run that should be fastest over each run it is compared with.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from network import command
from rich.console import Console
from rich.table import Table
from run import measured
from scenarios import SCENARIOS

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    scenario: Annotated[str, typer.Option(help=f"one of {', '.join(SCENARIOS)}")],
    seq: Annotated[list[int], typer.Option(help="global tokens; repeat it")],
    nodes: Annotated[list[int], typer.Option(help="nodes; repeat it")],
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every round's seconds to this file")] = None,
) -> None:
    with command():
        if scenario not in SCENARIOS or not SCENARIOS[scenario].targets:
            raise ValueError(f"--scenario {scenario}: must be one with a target, such as linear16")
        chosen = SCENARIOS[scenario]
        points = sorted({(max(nodes), s) for s in seq} | {(n, max(seq)) for n in nodes})
        found = [measured(replace(chosen, nodes=n, seq=s), rounds=rounds, timeout=3600) for n, s in points]
    fast, others = chosen.targets[0].fast, [target.slow for target in chosen.targets]
    table = Table("nodes", "tokens", f"{fast}, seconds", *(f"over {name}" for name in others))
    for (n, s), report in zip(points, found, strict=True):
        seconds = {m.entry: m.median for m in report.measured}
        table.add_row(str(n), str(s), f"{seconds[fast]:.3f}", *(f"{seconds[o] / seconds[fast]:.2f}x" for o in others))
    Console().print(table)
    if json_file:
        rows = [
            {"nodes": n, "seq": s, "rate": chosen.rate, "seconds": {m.entry: m.seconds for m in report.measured}}
            for (n, s), report in zip(points, found, strict=True)
        ]
        json_file.write_text(json.dumps(rows, indent=2))
    raise typer.Exit(not all(m.correct for report in found for m in report.measured))


if __name__ == "__main__":
    app()
