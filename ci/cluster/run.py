"""Context-parallel attention on a virtual cluster: real Gloo ranks on slow links, on one Linux machine. Needs root.

    python ci/cluster/run.py --scenario flat64
    python ci/cluster/run.py --scenario flat64 --rate 10mbit --rounds 3
    python ci/cluster/run.py --nodes 8 --rate 50mbit --seq 4096 --heads 4 --run ring --run attention2d:grid=4x2

All contestants are checked against one device, then measured in turn in one process group. Exits with 1 if a contestant
is wrong or a target is missed, 2 for a wrong flag or an unsuitable machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from bench import measure
from network import Network, command, require_cluster
from ranks import describe
from report import Report
from rich.console import Console
from scenarios import SCENARIOS, Scenario, parse_rate

from cp_plugin.cli.bench.report import Processors

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    scenario: Annotated[str | None, typer.Option(help=f"a preset: {', '.join(SCENARIOS)}; flags change it")] = None,
    nodes: Annotated[int | None, typer.Option(help="nodes of the cluster")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="ranks on each node (1)")] = None,
    nic: Annotated[str | None, typer.Option(help="who has a slow link of its own: rank or node (rank)")] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="of each slow link, each way, such as 50mbit"),
    ] = None,
    seq: Annotated[int | None, typer.Option(help="global tokens")] = None,
    heads: Annotated[int | None, typer.Option(help="query heads")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="key/value heads (as many as query heads)")] = None,
    head_dim: Annotated[int | None, typer.Option(help="head size (64)")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 (float32)")] = None,
    causal: Annotated[bool | None, typer.Option(help="causal mask, or full attention (causal)")] = None,
    run: Annotated[
        list[str] | None,
        typer.Option(
            help="a contestant, name[:option=value,...]; repeat it; the first is what others are compared with"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed calls of each contestant")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for all rounds together")] = 3600,
) -> None:
    with command():
        given = dict(
            nodes=nodes, ranks_per_node=ranks_per_node, nic=nic, rate=rate, seq=seq, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, dtype=dtype, causal=causal, runs=tuple(run) if run else None,
        )  # fmt: skip
        chosen = choose(scenario, {name: value for name, value in given.items() if value is not None})
        found = measured(chosen, rounds=rounds, timeout=timeout)
    found.print(Console())
    raise typer.Exit(not found.ok)


def measured(chosen: Scenario, *, rounds: int, timeout: float) -> Report:
    """Measure a scenario on a cluster; ValueError if the scenario or this machine is unsuitable."""
    speed = parse_rate(chosen.rate)
    chosen.entries()
    require_cluster()
    with Network(chosen.topology(), speed) as network:
        notes = [describe(network)]
        processors = Processors()
        found = measure(network, chosen, rounds=rounds, timeout=timeout)
    return Report(scenario=chosen, rate=network.rate, measured=found, others=processors.others(), notes=notes)


def choose(name: str | None, given: dict[str, Any]) -> Scenario:
    """The named scenario with the given changes; ValueError for what is wrong or missing."""
    if given.get("nic", "rank") not in ("rank", "node"):
        raise ValueError(f"--nic {given['nic']}: must be rank or node")
    if name is None:
        needed = {"nodes": "--nodes", "rate": "--rate", "seq": "--seq", "heads": "--heads", "runs": "--run"}
        lacking = [flag for key, flag in needed.items() if key not in given]
        if lacking:
            raise ValueError(f"give {', '.join(lacking)}, or a --scenario: {', '.join(SCENARIOS)}")
        return Scenario(**given)
    if name not in SCENARIOS:
        raise ValueError(f"--scenario {name}: must be one of {', '.join(SCENARIOS)}")
    return replace(SCENARIOS[name], **given)


if __name__ == "__main__":
    app()
