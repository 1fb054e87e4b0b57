"""Launches, bytes, allocations and messages of a call equal ``budget.json`` exactly.

After an intended change: ``python tests/equipment/cuda/budget.py --write``, and review the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from equipment.cuda import budget
from equipment.cuda.device import Start

from cp_plugin.engine.comm import Mesh, Pending
from cp_plugin.engine.kernels import merge

STEP = "step/zigzag, keys of an earlier rank/sdpa"


def changes(gpu: Start, name: str) -> list[str]:
    device, kept = gpu(), budget.kept()[name]
    got = budget.entries()[name](device)
    assert got.keys() == kept.keys()
    return [line for way in got for line in budget.differences(name, way, kept[way], got[way])]


@pytest.mark.parametrize("name", budget.entries())
def test_budget(gpu: Start, name: str) -> None:
    lines = changes(gpu, name)
    assert not lines, "\n".join((*lines, "if intended: python tests/equipment/cuda/budget.py --write"))


def test_the_file_has_all_entries_and_no_others() -> None:
    kept = budget.kept()
    assert kept.keys() == budget.entries().keys() and budget.written(kept) == budget.FILE.read_text()


def test_an_extra_launch_in_a_ring_step_is_found_and_named(gpu: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    shift = Mesh.shift

    def with_copies(mesh: Mesh, axis: str, tensors: Sequence[torch.Tensor], *rest: Any, **named: Any) -> Pending:
        return shift(mesh, axis, [t * 1 for t in tensors], *rest, **named)

    monkeypatch.setattr(Mesh, "shift", with_copies)
    lines, launches = changes(gpu, STEP), budget.kept()[STEP]["forward"].launches
    assert f"{STEP}, forward: launches {launches} -> {launches + 2}" in lines
    assert any("forward: +2 mul" in line and "cp_plugin/engine/comm/shards.py" in line for line in lines), lines


def test_a_sum_in_a_merge_is_found_and_named(gpu: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_into = merge.fused.merge_into

    def with_sum(*partials: Any) -> None:
        merge_into(*partials)
        partials[0].sum()

    monkeypatch.setattr(merge.fused, "merge_into", with_sum)
    lines = changes(gpu, STEP)
    assert any("+1 sum" in line and "cp_plugin/engine/kernels/merge.py" in line for line in lines), lines
