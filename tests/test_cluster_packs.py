"""Packs and windows on virtual clusters, without one: contestants, bytes, and the record of ``ci/cluster/seen.py``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch

_CLUSTER = Path(__file__).parent.parent / "ci" / "cluster"
sys.path.insert(0, str(_CLUSTER))

import alone  # noqa: E402
import packs  # noqa: E402
import seen  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

from cp_plugin import ContextParallel, Problem  # noqa: E402
from cp_plugin.attention.calls import Inputs  # noqa: E402
from cp_plugin.cli.bench.contestants import Entry  # noqa: E402
from cp_plugin.comm import Mesh, TraceMesh, run_threads  # noqa: E402
from cp_plugin.planner.packs import each_by_itself, padded  # noqa: E402
from cp_plugin.testing import oracle  # noqa: E402

_RECORD = json.loads(seen.RECORD.read_text())
_ROW = 2 * 32 * 4
"""Bytes of k and v of a token in the scenarios: one head of 32, float32."""


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rings@each", "--run rings: did you mean ring"),
        ("ring@everywhere", "--run ring@everywhere: say where tokens are, as in ring@placed: placed, each"),
        ("ring", "--run ring: say where tokens are, as in ring@placed: placed, each"),
        ("torch-ring:rotate=alltoall@each", "PyTorch's ring has no documents"),
    ],
)
def test_a_wrong_contestant_is_named(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="--run") as error:
        packs.OnPack.parse(text)
    assert part in str(error.value)


def test_documents_cut_by_themselves_are_whole_and_balanced() -> None:
    bounds = packs.small(4)
    layout = each_by_itself(bounds)
    held = [layout.positions(bounds[-1], 4, index) for index in range(4)]
    assert torch.equal(torch.cat(held).sort().values, torch.arange(bounds[-1]))
    first, last = Problem(size=4).mask(bounds).interval(torch.arange(bounds[-1]), bounds[-1])
    assert len({int((last - first)[mine].sum()) for mine in held}) == 1
    with pytest.raises(ValueError, match="must be a multiple of 8"):
        each_by_itself((0, 8, 20)).segments(20, 4, 0)


def test_packs_on_the_cluster_are_whole_chunks_and_full() -> None:
    for kind in ("chat", "code", "long"):
        bounds = packs.on_cluster(kind, 16, 65536)
        assert bounds[0] == 0 and bounds[-1] == 65536 and not any((b - a) % 64 for a, b in pairwise(bounds))
    assert padded((1, 8, 9), 4) == (8, 8, 16)


@pytest.mark.parametrize("run", ["needed@placed", "needed@zigzag", "ring@each", "all_gather@each"])
def test_a_pack_is_attended_as_on_one_device(run: str) -> None:
    bounds = packs.small(4)
    problem = Problem(
        size=4, heads=2, head_dim=8, seq_length=bounds[-1], dtype=torch.float64, documents=True, network="gloo"
    )
    case, entry = oracle.make_case(problem, "softmax", bounds), packs.OnPack.parse(run)
    setup = entry.setup(problem)

    def rank(mesh: Mesh) -> list[bool]:
        contestant = packs.Contestant(entry, ContextParallel(setup, mesh=mesh), setup, (bounds, packs.small(2)))
        parts = Inputs(*(None if x is None else contestant.shard(x) for x in case.inputs))
        wanted = map(contestant.shard, case.want)
        return [bool((x - y).abs().max() <= 1e-10) for x, y in zip(contestant.step(parts), wanted, strict=True)]

    assert all(all(found) for found in run_threads(rank, setup.axes))


@pytest.mark.parametrize("run", ["needed@placed", "needed@zigzag"])
def test_needed_sends_what_the_mask_shows_and_nothing_else(run: str) -> None:
    bounds, entry = packs.small(16), packs.OnPack.parse(run)
    problem = Problem(size=16, head_dim=32, seq_length=bounds[-1], dtype=torch.float32, documents=True)
    setup = entry.setup(problem)
    cp = entry.placed(ContextParallel(setup, mesh=TraceMesh(setup.axes, 0)), bounds)
    held = [cp.layout.positions(bounds[-1], 16, index) for index in range(16)]
    visible = oracle.seen(problem, bounds).tril()
    of_ranks = torch.stack([visible[mine].any(0) for mine in held])  # [readers, keys]
    rows = torch.stack([of_ranks[:, mine].sum(1) for mine in held], 1).fill_diagonal_(0)  # [readers, owners]
    assert alone.sent(entry, problem, bounds) == (_ROW * (2 * rows.sum(0) + rows.sum(1))).tolist()


def test_a_window_needs_one_message_from_the_rank_before() -> None:
    window = SCENARIOS["window16"]
    (entry, *_), rows = window.entries(), window.window
    assert alone.sent(entry, window.problem()) == [2 * rows * _ROW, *[3 * rows * _ROW] * 14, rows * _ROW]


def test_kernel_times_are_of_every_rank() -> None:
    bounds = packs.small(4)
    problem = Problem(size=4, head_dim=8, seq_length=bounds[-1], dtype=torch.float32, documents=True)
    found = alone.kernel_seconds([packs.OnPack.parse("ring@each")], problem, bounds, 1)
    assert list(found) == ["ring@each"] and len(found["ring@each"]) == 4 and min(found["ring@each"]) > 0


def test_entries_without_a_pack_stay_as_they_were() -> None:
    problem = Problem(size=4, head_dim=32, seq_length=128, dtype=torch.float32)
    assert alone.sent(Entry.parse("ring"), problem) == [3 * 3 * 32 * _ROW] * 4


@pytest.mark.parametrize("name", ["chat16", "window16"])
def test_the_record_has_the_bytes_that_are_counted_here(name: str) -> None:
    """The record has the least and the most that a real rank sent; rings and all-gathers send everything 3 times."""
    scenario = SCENARIOS[name]
    counted = {str(e): alone.sent(e, scenario.problem(), scenario.bounds()) for e in scenario.entries()}
    assert list(counted.values())[1:] == [[3 * 15 * 4096 * _ROW] * 16] * 3
    for part in (_RECORD[name], _RECORD[f"{name}-fast"]):
        assert {m["entry"]: tuple(m["booked"]) for m in part["measured"]} == {
            run: (min(of_ranks), max(of_ranks)) for run, of_ranks in counted.items()
        }


@pytest.mark.parametrize("name", seen.TABLES)
def test_the_record_is_of_the_scenario_and_meets_its_targets(name: str) -> None:
    part, scenario = _RECORD[name], SCENARIOS[name]
    assert part["ok"] and len(part["targets"]) == len(scenario.targets) == len(scenario.runs) - 1
    assert all(target["met"] and target["ratio"] >= target["at_least"] for target in part["targets"])
    assert part["scenario"] == json.loads(json.dumps(asdict(scenario))), "measured with other sizes"


def test_the_record_of_kernel_times_meets_its_target() -> None:
    found = _RECORD["balance"]["packs"]
    assert [(pack["kind"], pack["seed"]) for pack in found] == [(k, n) for k in seen.KINDS for n in range(seen.PACKS)]
    assert all(list(pack["seconds"]) == list(seen.RUNS) for pack in found)
    assert all(len(seconds) == seen.RANKS for pack in found for seconds in pack["seconds"].values())
    assert all(seen.shorter(found, kind) >= seen.SHORTER for kind in seen.KINDS)


def test_bytes_at_full_size_are_those_of_the_record() -> None:
    assert list(_RECORD["bytes"]) == list(seen.FULL)
    assert seen.full_size_bytes("code") == _RECORD["bytes"]["code"]
