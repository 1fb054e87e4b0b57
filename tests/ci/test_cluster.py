"""The virtual cluster of ci/cluster: its contestants, its command line, the speed of its links, and its clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import network as networks
import predict
import pytest
import run as cli
import scenarios
import torch
import torch.distributed as dist
from iproute import missing
from network import Network, Topology
from processes import alive, interruptible, wait_until
from scenarios import SCENARIOS, Scenario
from typer.testing import CliRunner

from cp_plugin.engine.attention.calls import Inputs
from cp_plugin.engine.core.problem import Problem
from cp_plugin.tools.bench.contestants import random_parts
from cp_plugin.tools.bench.report import Measured
from cp_plugin.tools.bench.run import Rank, plan

_CLUSTER = Path(__file__).parents[2] / "ci" / "cluster"
_LACKING = missing()
needs_cluster = pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
_TINY = ("--scenario", "tiny", "--rounds", "1000", "--timeout", "300")


@pytest.mark.parametrize("scenario", [*SCENARIOS.values(), *predict.SCENARIOS], ids=str)
def test_scenarios_are_runnable_and_their_targets_are_run(scenario: Scenario):
    planned = plan(scenario.problem(), scenario.entries(), "cpu").measured
    assert [(str(m.entry), m.cannot) for m in planned] == [(run, None) for run in scenario.runs]
    compared = {run for target in scenario.targets for run in (target.fast, target.slow)}
    assert compared <= set(scenario.runs) and bool(compared) == (scenario in SCENARIOS.values())


def test_who_reaches_whom():
    per_rank, per_node = (Topology(nodes=2, ranks_per_node=2, nic=nic) for nic in ("rank", "node"))
    assert [per_rank.station(r) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [per_node.station(r) for r in range(4)] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert per_rank.hosts() == ("node0", "node0", "node1", "node1")
    assert (per_rank.address(3), per_node.address(3)) == ("10.77.1.2", "10.77.1.1")


@needs_cluster
@pytest.mark.parametrize("nic", ["rank", "node"])
def test_links_are_slow_between_nodes_and_shared_as_the_cards_are(nic):
    rate = 50_000_000
    with Network(Topology(nodes=2, ranks_per_node=2, nic=nic), rate) as network:
        (inside,) = streams(network, [(0, 1)], 10_000_000)
        (between,) = streams(network, [(0, 2)], 2_000_000)
        both = streams(network, [(0, 2), (1, 3)], 2_000_000)
        opposite = streams(network, [(0, 2), (2, 0)], 2_000_000)
    assert 0.85 * rate < between < 1.05 * rate
    assert inside > 10 * between
    assert sum(both) > 1.7 * rate if nic == "rank" else min(both) < 0.6 * rate
    assert min(opposite) > 0.85 * rate


def streams(network: Network, pairs: list[tuple[int, int]], nbytes: int) -> list[float]:
    """Bits per second from the first to the second rank of all pairs at once."""

    def rank() -> dict[tuple[int, int], float]:
        own, message = dist.get_rank(), torch.zeros(nbytes, dtype=torch.uint8)
        arriving = [pair for pair in pairs if pair[1] == own]  # first: Gloo announces a receive behind what it sends
        calls = [dist.P2POp(dist.irecv, torch.empty_like(message), source) for source, _ in arriving]
        calls += [dist.P2POp(dist.isend, message, target) for source, target in pairs if source == own]
        dist.barrier()
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        return dict.fromkeys(arriving, 8 * nbytes / (time.perf_counter() - start))

    speeds = {pair: speed for of_rank in cli.run_in(network, rank, timeout=60) for pair, speed in of_rank.items()}
    return [speeds[pair] for pair in pairs]


def sent_bytes() -> int:
    """Bytes sent over this rank's slow link so far, headers and acknowledgements included."""
    lines = dict(line.split(":") for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:])
    return int({name.strip(): counts for name, counts in lines.items()}["slow"].split()[8])


def count_sent(network: Network, problem: Problem, contestants: Sequence[Measured]) -> list[int]:
    """Most bytes that a step of each contestant sends over one slow link."""

    def rank() -> list[int]:
        counts = []
        for one in contestants:
            contestant = Rank(torch.device("cpu"), 1).start(one, problem)
            whole = random_parts(problem, problem.seq_length // problem.size, torch.device("cpu"))
            parts = Inputs(*(None if x is None else contestant.arranged(x) for x in whole))
            contestant.step(parts)
            dist.barrier()
            before = sent_bytes()
            contestant.step(parts)
            dist.barrier()  # everything the peers wait for has been sent
            counts.append(sent_bytes() - before)
        return counts

    return [max(of_ranks) for of_ranks in zip(*cli.run_in(network, rank, timeout=60), strict=True)]


@needs_cluster
def test_results_are_right_and_the_links_count_what_the_ledger_books():
    scenario = Scenario(
        nodes=2, ranks_per_node=2, nic="rank", rate=50_000_000, seq=1024, heads=4, kv_heads=2, head_dim=32,
        runs=("ring", "burst", "torch-ring:rotate=alltoall", "torch-ring:rotate=allgather,hops=p2p"),
    )  # fmt: skip
    with Network(scenario, scenario.rate) as network:
        result = cli.measured(network, scenario, rounds=1, timeout=60)
        ring_wire, burst_wire, *torch_wires = count_sent(network, result.problem, result.measured)
    assert [str(m.entry) for m in result.measured] == list(scenario.runs)
    for m in result.measured:
        assert set(m.errors) == {"out", "dq", "dk", "dv"} and max(m.errors.values()) <= 1e-5, m
    ring, _, *torch_rings = result.measured
    assert ring.sent is not None and ring.sent[0] == ring.sent[1]
    hop = ring.sent[1] / 9  # of k and v: three up in the forward; three down in the backward, and three of sums
    assert 6 * hop <= ring_wire <= 1.05 * 6 * hop, "over the card of a node's lower rank, its neighbour's has the rest"
    assert [m.sent for m in torch_rings] == [None, None]
    assert all(0.9 < wire / (10 * hop) < 1.1 for wire in torch_wires), "all hops up, and one more of sums"
    assert burst_wire < 0.6 * ring_wire
    assert ring.taken.medians.total >= 0.9 * 8 * ring.sent[1] / scenario.rate


TINY = "Scenario(nodes=2, ranks_per_node=2, rate=20 * MBIT, seq=256, heads=4, runs=('ring',))"


@needs_cluster
def test_the_command_prints_a_table_and_removes_its_networks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(SCENARIOS, "tiny", eval(TINY, vars(scenarios)))
    done = CliRunner().invoke(cli.app, ["--scenario", "tiny", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert "ring" in done.output and "2 nodes x 2, a slow link per rank, 20 Mbit/s" in " ".join(done.output.split())
    assert _namespaces(os.getpid()) == []


@needs_cluster
def test_nothing_is_left_behind():
    """Three clusters at the same time, each ended by another signal during a measurement."""
    ends = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
    runs = {number: _start() for number in ends}
    pids = {number: _await_ranks(run) for number, run in runs.items()}
    for number, run in runs.items():
        run.send_signal(number)
        assert run.wait(timeout=30) == ends[number]
        wait_until(lambda number=number: not any(map(alive, pids[number])))
        assert len(_namespaces(run.pid)) == (5 if number == signal.SIGKILL else 0)
    killed = runs[signal.SIGKILL].pid
    assert set(_namespaces(killed)) <= set(networks.remove_stale())
    assert _namespaces(killed) == []


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", f"import run; from scenarios import *; SCENARIOS['tiny'] = {TINY}; run.app()", *_TINY],
        env={**os.environ, "PYTHONPATH": f"{_CLUSTER}:{_CLUSTER.parents[1]}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=interruptible,
    )


def _await_ranks(run: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of its ranks, once they have joined Gloo and thus have its threads."""
    ranks: list[int] = []

    def there() -> bool:
        assert run.poll() is None, "it ended before it measured"
        ranks[:] = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        return len(ranks) == 4 and all(len(os.listdir(f"/proc/{rank}/task")) > 2 for rank in ranks)

    wait_until(there)
    assert len(_namespaces(run.pid)) == 5  # two nodes of two cards, and the core
    return ranks


def _namespaces(pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"cpp-{pid}-*")]
