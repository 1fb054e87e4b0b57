"""The virtual cluster of ci/cluster: its contestants, its command line, the speed of its links, and its clean-up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import bench
import network as networks
import packs
import pytest
import ranks
import run as cli
import torch
from iproute import missing
from network import Network, Topology
from nightly import nightly
from processes import alive, interruptible, wait_until
from scenarios import SCENARIOS, Scenario, parse_rate
from typer.testing import CliRunner

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention.calls import Inputs
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.planner.packs import each_by_itself
from cp_plugin.testing import oracle

_CLUSTER = Path(__file__).parent.parent / "ci" / "cluster"
_LACKING = missing()
needs_cluster = pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))
_TINY = ("--nodes", "2", "--ranks-per-node", "2", "--rate", "20mbit", "--seq", "256", "--heads", "4", "--run", "ring")


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_scenarios_are_runnable_and_their_targets_are_run(name: str):
    scenario = SCENARIOS[name]
    assert [str(entry) for entry in scenario.entries()] == list(scenario.runs)
    compared = {run for target in scenario.targets for run in (target.fast, target.slow)}
    assert compared and compared <= set(scenario.runs)


def test_who_reaches_whom():
    per_rank, per_node = (Topology(nodes=2, ranks_per_node=2, nic=nic) for nic in ("rank", "node"))
    assert [per_rank.station(r) for r in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [per_node.station(r) for r in range(4)] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert per_rank.hosts() == ("node0", "node0", "node1", "node1")
    assert (per_rank.address(3), per_node.address(3)) == ("10.77.1.2", "10.77.1.1")


def test_documents_cut_by_themselves_are_whole_and_balanced() -> None:
    bounds = packs.small(4)
    layout = each_by_itself(bounds)
    held = [layout.positions(bounds[-1], 4, index) for index in range(4)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(bounds[-1]))
    first, last = Problem(size=4).mask(bounds).interval(torch.arange(bounds[-1]), bounds[-1])
    assert len({int((last - first)[mine].sum()) for mine in held}) == 1
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        each_by_itself((0, 8, 20)).segments(20, 4, 0)


@pytest.mark.parametrize("run", ["needed@placed", "needed@zigzag", "ring@each", "all_gather@each"])
def test_a_pack_is_attended_as_on_one_device(run: str) -> None:
    bounds = packs.small(4)
    problem = Problem(
        size=4, heads=2, head_dim=8, seq_length=bounds[-1], dtype=torch.float64, documents=True
    ).with_transport(network="gloo")
    case, entry = oracle.make_case(problem, "softmax", bounds), packs.OnPack.parse(run)
    setup = entry.setup(problem)

    def rank(mesh: Mesh) -> list[bool]:
        contestant = packs.Contestant(entry, ContextParallel(setup, mesh=mesh), setup, (bounds, packs.small(2)))
        parts = Inputs(*(None if x is None else contestant.shard(x) for x in case.inputs))
        wanted = map(contestant.shard, case.want)
        return [bool((x - y).abs().max() <= 1e-10) for x, y in zip(contestant.step(parts), wanted, strict=True)]

    assert all(all(found) for found in run_threads(rank, setup.axes))


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
        wait_until(lambda number=number: not any(map(alive, pids[number])))
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
        preexec_fn=interruptible,
    )


def _await_ranks(run: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of its ranks, once they have joined Gloo and thus have its threads."""
    found: list[int] = []

    def there() -> bool:
        assert run.poll() is None, "it ended before it measured"
        found[:] = map(int, Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())
        return len(found) == 4 and all(len(os.listdir(f"/proc/{rank}/task")) > 2 for rank in found)

    wait_until(there)
    assert len(_namespaces(run.pid)) == 5  # two nodes of two cards, and the core
    return found


def _namespaces(pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"cpp-{pid}-*")]
