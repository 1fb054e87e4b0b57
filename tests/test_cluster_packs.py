"""Packs on virtual clusters, without one: contestants and results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

_CLUSTER = Path(__file__).parent.parent / "ci" / "cluster"
sys.path.insert(0, str(_CLUSTER))

import packs  # noqa: E402

from cp_plugin import ContextParallel, Problem  # noqa: E402
from cp_plugin.attention.calls import Inputs  # noqa: E402
from cp_plugin.comm import Mesh, run_threads  # noqa: E402
from cp_plugin.planner.packs import each_by_itself  # noqa: E402
from cp_plugin.testing import oracle  # noqa: E402


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
