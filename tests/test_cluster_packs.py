"""Packs and windows on virtual clusters: contestants, and the bytes that each sends. Needs no cluster."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

_CLUSTER = Path(__file__).parent.parent / "ci" / "cluster"
sys.path.insert(0, str(_CLUSTER))

import alone  # noqa: E402
import packs  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402

from cp_plugin import ContextParallel, Problem  # noqa: E402
from cp_plugin.attention.calls import Inputs  # noqa: E402
from cp_plugin.cli.bench.contestants import Entry  # noqa: E402
from cp_plugin.comm import Mesh, TraceMesh, run_threads  # noqa: E402
from cp_plugin.planner.packs import each_by_itself, padded  # noqa: E402
from cp_plugin.testing import oracle  # noqa: E402

_ROW = 2 * 32 * 4
"""Bytes of k and v of a token in the scenarios: one head of 32, float32."""


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rings@each", "--run rings: unknown: did you mean ring"),
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


@pytest.mark.parametrize("name", ["chat16", "window16"])
def test_a_ring_and_an_all_gather_send_all_three_times_around_whatever_is_seen(name: str) -> None:
    _, *others = (alone.sent(e, SCENARIOS[name].problem(), SCENARIOS[name].bounds()) for e in SCENARIOS[name].entries())
    assert others == [[3 * 15 * 4096 * _ROW] * 16] * 3


def test_entries_without_a_pack_stay_as_they_were() -> None:
    problem = Problem(size=4, head_dim=32, seq_length=128, dtype=torch.float32)
    assert alone.sent(Entry.parse("ring"), problem) == [3 * 3 * 32 * _ROW] * 4
