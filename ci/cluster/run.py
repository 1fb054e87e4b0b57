"""Context-parallel attention on a virtual cluster: real Gloo ranks on slow links, on one Linux machine. Needs root.

    python ci/cluster/run.py --scenario flat64
    python ci/cluster/run.py --scenario linear16 --nodes 8 --seq 65536 --rounds 3

What ``cp-plugin bench`` does, on links of a given rate: each contestant is checked against one device, and the right
ones are timed in turn. Exits with 1 if a contestant is wrong or a target is missed, 2 for a wrong flag or an unsuitable
machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from network import Network, command
from rich.console import Console
from scenarios import SCENARIOS, Scenario, Target

from cp_plugin.engine.common.names import one_of
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.testing.launch import run_ranks
from cp_plugin.tools.bench.contestants import Contestant
from cp_plugin.tools.bench.report import CaseResult, Processors, Report
from cp_plugin.tools.bench.run import Rank, filled, plan, question
from cp_plugin.tools.output import new_console

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    scenario: Annotated[str, typer.Option(help=f"one of {', '.join(SCENARIOS)}")],
    nodes: Annotated[int | None, typer.Option(min=2, max=250, help="other nodes than the scenario's")] = None,
    seq: Annotated[int | None, typer.Option(help="other global tokens")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed calls of each contestant")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for all rounds together")] = 3600,
) -> None:
    with command():
        one_of("--scenario", scenario, SCENARIOS)
        chosen, processors = SCENARIOS[scenario], Processors()
        chosen = replace(chosen, nodes=nodes or chosen.nodes, seq=seq or chosen.seq)
        with Network(chosen, chosen.rate) as network:
            result = measured(network, chosen, rounds=rounds, timeout=timeout)
    report = Report(results=[result], device=str(network), rounds=rounds, others=processors.others())
    console = new_console()
    report.print(console)
    met = [_met(target, result, console) for target in chosen.targets]
    raise typer.Exit(not (report.ok and all(met)))


def measured(
    network: Network, scenario: Scenario, *, rounds: int, timeout: float, profile: Cluster | None = None
) -> CaseResult:
    """Check and time all contestants of a scenario on its network, and predict their times with a profile; RankError if
    a rank fails, ValueError for a contestant that cannot run."""
    planned = plan(scenario.problem(), scenario.entries(), "cpu", profile)
    if refused := [f"{m.entry}: {m.cannot}" for m in planned.measured if m.cannot is not None]:
        raise ValueError("; ".join(refused))
    questions = [question(planned.problem, planned.measured[0].entry.kind)]
    fields = run_in(network, lambda: _Rank(scenario.apart, rounds).run([planned], questions), timeout=timeout)[0]
    return filled(planned, fields[0])


def run_in(network: Network, fn: Callable[[], Any], *, timeout: float) -> list[Any]:
    """Call ``fn`` as every rank of the network, with torch.distributed initialised; results in rank order.

    Raises RankError or RankTimeout as ``run_ranks`` does.
    """

    def rank() -> Any:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # the store connects before the rank enters its namespace, so its traffic is not on the links
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        os.environ["GLOO_SOCKET_IFNAME"] = network.enter(number)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        return fn()

    return run_ranks(rank, network.topology.size, timeout=timeout)


class _Rank(Rank):
    """A rank of a virtual cluster."""

    def __init__(self, apart: bool, rounds: int) -> None:
        """apart: all ranks begin the backward pass together."""
        super().__init__(torch.device("cpu"), rounds)
        self._apart = apart

    def start(self, *what: Any) -> Contestant:
        contestant = super().start(*what)
        if self._apart:
            contestant.step = _apart(contestant.step)
        return contestant

    def timed(self, *what: Any) -> list[dict[str, Any]]:
        yield_to_network()  # all groups have their threads now
        return super().timed(*what)


def _apart(step: Callable[..., Any]) -> Callable[..., Any]:
    def apart(x: Any, between: Callable[[], object] = lambda: None) -> Any:
        def turn() -> None:
            dist.barrier()
            between()

        return step(x, turn)

    return apart


def yield_to_network() -> None:
    """Lower the priority of this computing thread below Gloo's: a network card needs no processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _met(target: Target, result: CaseResult, console: Console) -> bool:
    """Print a target and its ratio; whether it is met. A contestant that is wrong has no time."""
    taken = {str(m.entry): m.taken for m in result.measured}
    fast, slow = taken[target.fast], taken[target.slow]
    ratio = slow.medians.total / fast.medians.total if fast is not None and slow is not None else 0.0
    met = ratio >= target.at_least
    text = f"{target.fast} is {ratio:.2f}x as fast as {target.slow} (wanted: {target.at_least:g}x)"
    style = "green" if met else "bold red"
    console.print(f"{'PASS' if met else 'FAIL'} {text}", style=style, markup=False, highlight=False)
    return met


if __name__ == "__main__":
    app()
