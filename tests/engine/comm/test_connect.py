"""Process groups are connected where they are made, in one order; a rank that does not join is named in time."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equipment.nccl import lazy

from cp_plugin.engine.comm import WHOLE, ConnectError, GroupMesh, connect, group, sums
from cp_plugin.testing.launch import run_ranks

AXES = {"slow": 2, "fast": 3}


def test_every_group_is_connected_before_any_method_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all its ranks, in one order, for what it is for. A method's first message may be between two of them."""

    def rank() -> tuple[list[tuple[str, list[int]]], list[float]]:
        connected = []
        gather, batch = dist.all_gather, dist.batch_isend_irecv

        def gathered(everyone: list[torch.Tensor], x: torch.Tensor, group: dist.ProcessGroup) -> None:
            connected.append(("all_gather", dist.get_process_group_ranks(group)))
            gather(everyone, x, group=group)

        def exchanged(operations: list[dist.P2POp]) -> list[dist.Work]:
            assert [one.tensor.numel() for one in operations] == [1, 1]
            connected.append(("exchange", dist.get_process_group_ranks(operations[0].group)))
            return batch(operations)

        monkeypatch.setattr(dist, "all_gather", gathered)
        monkeypatch.setattr(dist, "batch_isend_irecv", exchanged)
        mesh = GroupMesh.from_group(AXES, dist.group.WORLD, (WHOLE, sums("fast")), collective=("slow",))
        monkeypatch.undo()
        assert [ranks for _, ranks in connected] == list(map(dist.get_process_group_ranks, mesh.groups.values()))
        partner = {0: 5, 5: 0}.get(mesh.index, mesh.index)
        own = torch.full((1,), mesh.index)
        return connected, mesh.exchange(WHOLE, (own,), to=partner, source=partner).wait()[0].tolist()

    for index, (connected, received) in enumerate(run_ranks(rank, 6, init_process_group=True)):
        slow, fast = divmod(index, 3)
        row = [slow * 3 + i for i in range(3)]
        exchanges = [("exchange", ranks) for ranks in (row, row, list(range(6)))]
        assert connected == [("all_gather", [fast, 3 + fast]), *exchanges]
        assert received == [{0: 5, 5: 0}.get(index, index)]


@pytest.mark.parametrize("collective", [(), ("kv",)])
def test_a_missing_rank_is_named_with_its_group(collective: tuple[str, ...]) -> None:
    def rank() -> str:
        pair = dist.new_group([0, 2], timeout=timedelta(seconds=2))
        if dist.get_rank() == 2:
            time.sleep(3)
        if dist.get_rank() != 0:
            return ""
        with pytest.raises(ConnectError) as refused:
            connect({"kv": pair}, collective=collective)
        return str(refused.value)

    with lazy.waiting(0):  # the group's own timeout is to end it
        said = run_ranks(rank, 3, init_process_group=True)[0]
    assert said.startswith("the process group 'kv' of ranks 0, 2 cannot connect from rank 0: ")


def test_a_group_with_silent_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> None:
        monkeypatch.setattr(dist, "all_gather", lambda everyone, x, group: None)
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [])
        for collective, answers in (((), r"\[0\]"), (("kv",), r"\[0, 0\]")):
            counted = rf"the process group 'kv' of ranks 0-1 counts {answers} ranks instead of 2"
            with pytest.raises(ConnectError, match=counted):
                connect({"kv": dist.group.WORLD}, collective=collective)

    run_ranks(rank, 2, init_process_group=True)


def test_every_nccl_group_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes each group's name and timeout into the options it is given, and keeps them."""
    options = []

    def stand_in(ranks: list[int]) -> Any:
        return SimpleNamespace(ranks=ranks, size=lambda: len(ranks), rank=lambda: 0)

    def new_group(ranks: list[int], *, pg_options: dist.ProcessGroupNCCL.Options, **unused: object) -> Any:
        options.append(pg_options)
        return stand_in(ranks)

    torchs = {"get_backend": lambda group: "nccl", "get_rank": lambda: 0, "new_group": new_group}
    for name, function in torchs.items() | {("get_process_group_ranks", lambda group: group.ranks)}:
        monkeypatch.setattr(dist, name, function)
    monkeypatch.setattr(group, "connect", lambda groups, **_: None)
    GroupMesh.from_group(AXES, stand_in([0, 1, 2, 3, 4, 5]), (WHOLE, sums("fast")))
    assert len(options) == len(set(map(id, options))) == 3
    assert all(one.is_high_priority_stream for one in options)


def test_several_tensors_are_one_launch_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NCCL: gathers and reductions through torch's coalescing, an all-to-all as one batch of messages."""

    def rank() -> list[list]:
        mesh = GroupMesh.from_group({"cp": 4}, dist.group.WORLD)
        x = torch.arange(8.0).view(4, 2) + 10 * mesh.index
        y = torch.arange(4.0, dtype=torch.bfloat16) - mesh.index
        results = []
        for packs in (True, False):
            if not packs:
                monkeypatch.setattr(GroupMesh, "_packs", lambda *_: False)
            gathered, swapped = mesh.all_gather("cp", (x, y)), mesh.all_to_all("cp", (x, y))
            results.append([t.tolist() for t in (*gathered.wait(), *swapped.wait())])
        assert results[0] == results[1]
        calls = []
        coalesced = dist._coalescing_manager
        monkeypatch.setattr(dist, "_coalescing_manager", lambda **named: calls.append(1) or coalesced(**named))
        monkeypatch.setattr(group, "SHORT", 0)
        mesh.all_gather("cp", (x, y)).wait()
        batches = []
        batch = dist.batch_isend_irecv
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: batches.append(len(ops)) or batch(ops))
        mesh.all_to_all("cp", (x, y)).wait()
        assert (calls, batches) == ([1], [2 * 2 * 3])
        works = group._together(group._all_gather_single, mesh.groups["cp"], (torch.empty(8),), (torch.ones(2),))
        works.wait()
        return results[0]

    for index, (xs, ys, xt, yt) in enumerate(run_ranks(rank, 4, init_process_group=True)):
        assert xs == [[10 * r + 2 * i, 10 * r + 2 * i + 1] for r in range(4) for i in range(4)]
        assert ys == [i - r for r in range(4) for i in range(4)]
        assert xt == [[10 * r + 2 * index, 10 * r + 2 * index + 1] for r in range(4)]
        assert yt == [index - r for r in range(4)]
