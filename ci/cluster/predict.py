"""The planner's predictions against measurements on calibrated virtual clusters. Needs root.

    python ci/cluster/predict.py

``calibrate`` measures kernels and single collectives inside every network; methods are then timed, forward and
backward, and compared with the simulation from that calibration. Exits with 1 if a target is missed, 2 on an unsuitable
machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from bench import measure, yield_to_network
from network import Network, Topology, command, require_cluster
from ranks import run_in
from rich.console import Console
from rich.table import Table
from scenarios import DTYPES, Scenario, parse_rate

from cp_plugin.cli.bench.report import Processors, print_notes
from cp_plugin.planner.calibration.link_rates import calibrate
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.machine.links import place
from cp_plugin.planner.trace.timeline import simulate

MEDIAN_ERROR, RIGHT_PAIRS, APART = 0.15, 0.9, 0.15
"""Largest median error, least share of pairs in the right order, and the difference from which a pair counts."""
_TIMEOUT = 600.0
app = typer.Typer(add_completion=False)


_FLAT8 = {"nodes": 8, "rate": "20mbit"}
_FLAT16 = {"nodes": 16, "rate": "20mbit"}
_PER_RANK = {"nodes": 4, "ranks_per_node": 4, "nic": "rank", "rate": "20mbit"}
_PER_NODE = {"nodes": 4, "ranks_per_node": 4, "nic": "node", "rate": "50mbit"}
_FAST8 = {"nodes": 8, "rate": "100mbit"}  # where kernels matter
_FEW_HEADS = {"seq": 2048, "heads": 4, "head_dim": 32}
_GROUPED = {"seq": 2048, "heads": 8, "kv_heads": 2, "head_dim": 32}
_LINEAR = {"seq": 2048, "heads": 32, "head_dim": 32}
_GRIDS = ("attention2d:grid=4x4", "attention2d:grid=2x8", "attention2d:head_parallel=4")
_NESTED = ("ring", "double_ring", "burst", "attention2d", "attention2d:grid=8x2", "usp:head_parallel=4", "all_gather")
_HEADS = ("ulysses:layout=zigzag", "usp:head_parallel=4", "attention2d:grid=2x4", "attention2d:head_parallel=2")
_EIGHT = ("all_gather", "attention2d:grid=2x4")
_CASES = (
    (_FLAT8, {"seq": 1024, "heads": 8, "head_dim": 32}, ("ring", "striped", "all_gather", *_HEADS)),
    (_FLAT8, _GROUPED | {"causal": False}, ("ring", *_EIGHT, "attention2d", "usp:head_parallel=2")),
    (_FLAT8, _LINEAR, ("lasp2", "lasp1")),
    (_FLAT16, _FEW_HEADS, ("ring", "usp:head_parallel=4", "all_gather", *_GRIDS)),
    (
        _FLAT16,
        _FEW_HEADS | {"seq": 4096, "dtype": "bfloat16"},
        ("ring", "ring:fp8=comm", "attention2d", "attention2d:fp8=comm"),
    ),
    (_FLAT16, _LINEAR, ("lasp2", "lasp1")),
    (_PER_RANK, _FEW_HEADS, _NESTED),
    (_PER_NODE, _FEW_HEADS, _NESTED),
    (_PER_NODE, _GROUPED, ("ring", "double_ring", "burst:backward=q", "attention2d", "all_gather")),
    (
        _FAST8,
        {"seq": 8192, "heads": 4, "kv_heads": 1},
        ("ring", "ring:layout=zigzag", "striped", *_EIGHT, "attention2d:grid=8x1"),
    ),
)
SCENARIOS = tuple(Scenario(apart=True, **network, **problem, runs=runs) for network, problem, runs in _CASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One method on one problem."""

    scenario: Scenario
    entry: str
    correct: bool
    measured: float
    """Median seconds of forward and backward."""
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def median_error(compared: Sequence[Compared]) -> float:
    return statistics.median(abs(c.error) for c in compared)


def pairs(compared: Sequence[Compared]) -> list[tuple[Compared, Compared]]:
    """(faster, slower) methods on one problem that differ by more than ``APART`` as measured."""
    found = []
    for _, group in itertools.groupby(compared, key=lambda c: c.scenario):
        for pair in itertools.combinations(group, 2):
            fast, slow = sorted(pair, key=lambda c: c.measured)
            if slow.measured > (1 + APART) * fast.measured:
                found.append((fast, slow))
    return found


@app.command(help=__doc__)
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[list[int] | None, typer.Option(help="number of a network, from 0; repeat it")] = None,
) -> None:
    with command():
        require_cluster()
        processors, compared = Processors(), []
        for number, ((topology, rate), scenarios) in enumerate(_by_network(SCENARIOS)):
            if not only or number in only:
                with Network(topology, parse_rate(rate)) as network:
                    profile = calibrated(network, scenarios)
                    for scenario in scenarios:
                        compared += _compare(network, scenario, profile, rounds)
    ok = _show(compared, processors.others(), Console())
    raise typer.Exit(not ok)


def _by_network(scenarios: Sequence[Scenario]) -> Iterator[tuple[tuple[Topology, str], list[Scenario]]]:
    for key, group in itertools.groupby(scenarios, key=lambda s: (s.topology(), s.rate)):
        yield key, list(group)


def calibrated(network: Network, scenarios: Sequence[Scenario]) -> Cluster:
    """The profile that ``cp-plugin calibrate`` would write."""
    hosts = network.topology.hosts()
    (head_dim,) = {s.head_dim for s in scenarios}
    dtypes = [DTYPES[name] for name in dict.fromkeys(s.dtype for s in scenarios)]

    def rank() -> Cluster:
        yield_to_network()
        shown = Console(stderr=True, quiet=dist.get_rank() != 0)
        with shown.status("calibrating") as status:
            return calibrate(
                _name(network.topology, f"{network.rate / 1e6:g}mbit"),
                torch.device("cpu"),
                dtypes,
                head_dim,
                hosts,
                status.update,
            )

    return run_in(network, rank, timeout=_TIMEOUT)[0]


def _compare(network: Network, scenario: Scenario, profile: Cluster, rounds: int) -> list[Compared]:
    problem, entries = scenario.problem(), scenario.entries()
    measured = measure(network, scenario, rounds=rounds, timeout=_TIMEOUT)
    found = []
    for entry, m in zip(entries, measured, strict=True):
        hosts = problem.transport.hosts or tuple(f"node{n}" for n in place(problem.size, profile))
        timeline = simulate(entry.setup(problem.with_transport(hosts=hosts)), cluster=profile, ranks="all")
        correct = m.correct or dict(entry.options).get("fp8") is not None
        times = {"measured": m.median, "predicted": timeline.seconds}
        found.append(Compared(scenario=scenario, entry=str(entry), correct=correct, **times))
    return found


def _show(compared: Sequence[Compared], others: float, console: Console) -> bool:
    """Print the table and the verdict; whether all targets are met."""
    table = Table("network", "problem", "method", title="Forward and backward, seconds")
    for column in ("predicted", "measured", "error"):
        table.add_column(column, justify="right")
    for c in compared:
        s = c.scenario
        heads = f"{s.heads}:{s.kv_heads}" if s.kv_heads else s.heads
        problem = f"{s.seq} tokens, {heads} x {s.head_dim}, {s.dtype}, {'causal' if s.causal else 'full'}"
        cells = (_name(s.topology(), s.rate), problem, c.entry, f"{c.predicted:.3f}", f"{c.measured:.3f}")
        table.add_row(*cells, f"{c.error:+.1%}", style=None if c.correct else "red")
    console.print(table)
    print_notes(console, (), others)
    error, ordered = median_error(compared), [fast.predicted < slow.predicted for fast, slow in pairs(compared)]
    right, number = sum(ordered), len(ordered)
    ok = error <= MEDIAN_ERROR and right >= RIGHT_PAIRS * number and all(c.correct for c in compared)
    console.print(
        f"{'PASS' if ok else 'FAIL'}: {len(compared)} configurations, median error {error:.1%} (wanted: "
        f"{MEDIAN_ERROR:.0%}); order right in {right} of {number} pairs that differ by more than {APART:.0%} "
        f"({right / max(number, 1):.1%}, wanted: {RIGHT_PAIRS:.0%})",
        style="green" if ok else "bold red",
        highlight=False,
        soft_wrap=True,
    )
    return ok


def _name(topology: Topology, rate: str) -> str:
    cards = f", a card per {topology.nic}" if topology.ranks_per_node > 1 else ""
    return f"{topology.nodes} x {topology.ranks_per_node}{cards}, {rate}"


if __name__ == "__main__":
    app()
