"""The virtual cluster of ci/cluster: its command line, the speed of its links, and its clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nightly import nightly
from typer.testing import CliRunner

_CLUSTER = Path(__file__).parent.parent / "ci" / "cluster"
sys.path.insert(0, str(_CLUSTER))

import bench  # noqa: E402
import network as networks  # noqa: E402
import ranks  # noqa: E402
import run as cli  # noqa: E402
from iproute import missing  # noqa: E402
from network import Network, Topology  # noqa: E402
from scenarios import SCENARIOS, Scenario, parse_rate  # noqa: E402

_LACKING = missing()
needs_cluster = pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
_TINY = ("--nodes", "2", "--ranks-per-node", "2", "--rate", "20mbit", "--seq", "256", "--heads", "4", "--run", "ring")


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_scenarios_are_runnable_and_their_targets_are_run(name: str):
    scenario = SCENARIOS[name]
    assert [str(entry) for entry in scenario.entries()] == list(scenario.runs)
    assert scenario.targets and {t.fast for t in scenario.targets} | {t.slow for t in scenario.targets} <= set(
        scenario.runs
    )


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
        (inside,) = ranks.stream(network, [(0, 1)], 10_000_000)
        (between,) = ranks.stream(network, [(0, 2)], 2_000_000)
        both = ranks.stream(network, [(0, 2), (1, 3)], 2_000_000)
        opposite = ranks.stream(network, [(0, 2), (2, 0)], 2_000_000)
    assert 0.85 * rate < between < 1.05 * rate
    assert inside > 10 * between
    assert sum(both) > 1.7 * rate if nic == "rank" else min(both) < 0.6 * rate
    assert min(opposite) > 0.85 * rate


@needs_cluster
def test_results_are_right_and_the_links_count_what_the_ledger_books():
    scenario = Scenario(
        nodes=2, ranks_per_node=2, nic="rank", rate="50mbit", seq=1024, heads=4, kv_heads=2, head_dim=32,
        runs=("ring", "burst", "torch-ring:rotate=alltoall", "torch-ring:rotate=allgather,hops=p2p"),
    )  # fmt: skip
    with Network(scenario.topology(), parse_rate(scenario.rate)) as network:
        found = bench.measure(network, scenario, rounds=1, timeout=60)
    assert [m.entry for m in found] == list(scenario.runs)
    for m in found:
        assert set(m.errors) == {"out", "dq", "dk", "dv"} and max(m.errors.values()) <= 1e-5, m
    ring, burst, *torch_rings = found
    assert ring.booked is not None and ring.booked[0] == ring.booked[1]
    hop = ring.booked[1] / 9  # of k and v: three up in the forward; three down in the backward, and three of sums
    assert 6 * hop <= ring.wire <= 1.05 * 6 * hop, "over the card of a node's lower rank, its neighbour's has the rest"
    for m in torch_rings:
        assert m.booked is None and 0.9 < m.wire / (10 * hop) < 1.1, "all hops up, and one more of sums"
    assert burst.wire < 0.6 * ring.wire
    assert ring.median >= 0.9 * 8 * ring.booked[1] / 50e6


@nightly
@needs_cluster
def test_linear_attention():
    """Whether it reaches the scenario's target does not matter: two short nodes are too few for that."""
    found = cli.measured(cli.choose("linear16", {"seq": 128, "nodes": 2}), rounds=1, timeout=60).measured
    assert [one.entry for one in found] == list(SCENARIOS["linear16"].runs)
    assert all(one.correct for one in found)


@needs_cluster
def test_the_command_prints_a_table_and_removes_its_networks():
    done = CliRunner().invoke(cli.app, [*_TINY, "--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert "ring" in done.output and "between nodes" in done.output and "20 Mbit/s" in done.output
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
        _await(lambda number=number: not any(map(_alive, pids[number])))
        assert len(_namespaces(run.pid)) == (5 if number == signal.SIGKILL else 0)
    killed = runs[signal.SIGKILL].pid
    assert set(_namespaces(killed)) <= set(networks.remove_stale())
    assert _namespaces(killed) == []


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(_CLUSTER / "run.py"), *_TINY, "--rounds", "1000", "--timeout", "300"],
        env={**os.environ, "PYTHONPATH": str(_CLUSTER.parent.parent), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells start background jobs without it
    )


def _await_ranks(run: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of its ranks, once they have joined Gloo and thus have its threads."""
    found: list[int] = []

    def there() -> bool:
        assert run.poll() is None, "it ended before it measured"
        found[:] = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        return len(found) == 4 and all(len(os.listdir(f"/proc/{rank}/task")) > 2 for rank in found)

    _await(there)
    assert len(_namespaces(run.pid)) == 5  # two nodes of two cards, and the core
    return found


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _namespaces(pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"cpp-{pid}-*")]
