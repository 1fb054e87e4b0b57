"""The planner's predictions against measurements on calibrated virtual clusters. Needs root.

    python ci/cluster/predict.py

``calibrate`` measures kernels and single collectives inside every network; methods are then timed, forward and
backward, and compared with the simulation from that calibration. Exits with 1 if a target is missed, 2 on an unsuitable
machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from network import Network, command
from rich.console import Console
from run import measured, run_in, yield_to_network
from scenarios import MBIT, Scenario

from cp_plugin.planner.calibration.link_rates import calibrate
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.tools.bench.cases import FULL
from cp_plugin.tools.bench.report import CaseResult, Processors, Report
from cp_plugin.tools.output import new_console

MEDIAN_ERROR, RIGHT_PAIRS, APART = 0.15, 0.9, 0.15
"""Largest median error, least share of pairs in the right order, and the difference from which a pair counts."""
_TIMEOUT = 600.0
app = typer.Typer(add_completion=False)

_FLAT8 = {"nodes": 8, "rate": 20 * MBIT}
_FLAT16 = {"nodes": 16, "rate": 20 * MBIT}
_PER_RANK = {"nodes": 4, "ranks_per_node": 4, "nic": "rank", "rate": 20 * MBIT}
_PER_NODE = {"nodes": 4, "ranks_per_node": 4, "nic": "node", "rate": 50 * MBIT}
_FAST8 = {"nodes": 8, "rate": 100 * MBIT}  # where kernels matter
_FEW_HEADS = {"seq": 2048, "heads": 4, "head_dim": 32}
_GROUPED = {"seq": 2048, "heads": 8, "kv_heads": 2, "head_dim": 32}
_LINEAR = {"seq": 2048, "heads": 32, "head_dim": 32}
_GRIDS = ("attention2d:grid=4x4", "attention2d:grid=2x8", "attention2d:head_parallel=4")
_NESTED = ("ring", "double_ring", "burst", "attention2d", "attention2d:grid=8x2", "usp:head_parallel=4", "all_gather")
_HEADS = ("ulysses:layout=zigzag", "usp:head_parallel=4", "attention2d:grid=2x4", "attention2d:head_parallel=2")
_EIGHT = ("all_gather", "attention2d:grid=2x4")
_CASES = (
    (_FLAT8, {"seq": 1024, "heads": 8, "head_dim": 32}, ("ring", "striped", "all_gather", *_HEADS)),
    (_FLAT8, _GROUPED | {"mask": FULL}, ("ring", *_EIGHT, "attention2d", "usp:head_parallel=2")),
    (_FLAT8, _LINEAR, ("lasp2", "lasp1")),
    (_FLAT16, _FEW_HEADS, ("ring", "usp:head_parallel=4", "all_gather", *_GRIDS)),
    (
        _FLAT16,
        _FEW_HEADS | {"seq": 4096, "dtype": torch.bfloat16},
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


@app.command(help=__doc__)
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    only: Annotated[list[int] | None, typer.Option(help="number of a network, from 0; repeat it")] = None,
) -> None:
    console, every = new_console(), list[CaseResult]()
    with command():
        networks = itertools.groupby(SCENARIOS, key=lambda s: (s.nodes, s.ranks_per_node, s.nic, s.rate))
        for number, (_, group) in enumerate(networks):
            if only and number not in only:
                continue
            scenarios, processors = list(group), Processors()
            with Network(scenarios[0], scenarios[0].rate) as network:
                profile = calibrated(network, scenarios)
                results = [measured(network, s, rounds=rounds, timeout=_TIMEOUT, profile=profile) for s in scenarios]
            device, others = str(network), processors.others()
            Report(results=results, device=device, rounds=rounds, cluster=profile.name, others=others).print(console)
            every += results
    raise typer.Exit(not verdict(every, console))


def calibrated(network: Network, scenarios: Sequence[Scenario]) -> Cluster:
    """The profile that ``cp-plugin calibrate`` would write."""
    (head_dim,) = {s.head_dim for s in scenarios}
    dtypes = list(dict.fromkeys(s.dtype for s in scenarios))

    def rank() -> Cluster:
        yield_to_network()
        shown = Console(stderr=True, quiet=dist.get_rank() != 0)
        with shown.status("calibrating") as status:
            return calibrate(
                str(network), torch.device("cpu"), dtypes, head_dim, network.topology.hosts(), status.update
            )

    return run_in(network, rank, timeout=_TIMEOUT)[0]


def verdict(results: Sequence[CaseResult], console: Console) -> bool:
    """Print how far the predictions are off; whether all targets are met. A pair is two methods on one problem."""
    wrong = any(m.wrong for result in results for m in result.measured)
    cases = [[(m.taken.medians.total, m.predicted) for m in r.measured if not m.wrong] for r in results]
    errors = [abs(predicted / seconds - 1) for case in cases for seconds, predicted in case]
    pairs = (pair for case in cases for pair in itertools.combinations(sorted(case), 2))
    ordered = [fast[1] < slow[1] for fast, slow in pairs if slow[0] > (1 + APART) * fast[0]]
    median, right, number = statistics.median(errors), sum(ordered), len(ordered)
    ok = median <= MEDIAN_ERROR and right >= RIGHT_PAIRS * number and not wrong
    console.print(
        f"{'PASS' if ok else 'FAIL'}: {len(errors)} configurations, median error {median:.1%} (wanted: "
        f"{MEDIAN_ERROR:.0%}); order right in {right} of {number} pairs that differ by more than {APART:.0%} "
        f"({right / max(number, 1):.1%}, wanted: {RIGHT_PAIRS:.0%})",
        style="green" if ok else "bold red",
        highlight=False,
        soft_wrap=True,
    )
    return ok


if __name__ == "__main__":
    app()
