"""Process groups are connected where they are made, in one order; a rank that does not join is named in time."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from strict import lazy

from cp_plugin.comm import WHOLE, ConnectError, GroupMesh, Watch, connect, group, sums
from cp_plugin.testing.launch import run_ranks

AXES = {"slow": 2, "fast": 3}


def test_every_group_is_connected_before_any_method_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all its ranks, in one order. A method's first message may be between two of them, as here."""

    def rank() -> tuple[list[list[int]], list[float]]:
        connected = []
        all_reduce = dist.all_reduce

        def recorded(x: torch.Tensor, group: dist.ProcessGroup) -> None:
            connected.append(dist.get_process_group_ranks(group))
            all_reduce(x, group=group)

        monkeypatch.setattr(dist, "all_reduce", recorded)
        mesh = GroupMesh.from_group(AXES, dist.group.WORLD, (WHOLE, sums("fast")))
        monkeypatch.undo()
        assert connected == [dist.get_process_group_ranks(group) for group in mesh.groups.values()]
        partner = {0: 5, 5: 0}.get(mesh.index, mesh.index)
        return connected, mesh.permute((torch.full((1,), mesh.index),), to=partner, source=partner).wait()[0].tolist()

    for index, (connected, received) in enumerate(run_ranks(rank, 6, init_process_group=True)):
        slow, fast = divmod(index, 3)
        row = [slow * 3 + i for i in range(3)]
        assert connected == [[fast, 3 + fast], row, row, list(range(6))]
        assert received == [{0: 5, 5: 0}.get(index, index)]


def test_a_missing_rank_is_named_with_its_group() -> None:
    def rank() -> str:
        pair = dist.new_group([0, 2], timeout=timedelta(seconds=2))
        if dist.get_rank() == 2:
            time.sleep(3)
        if dist.get_rank() != 0:
            return ""
        with pytest.raises(ConnectError) as refused:
            connect({"kv": pair})
        return str(refused.value)

    with lazy.waiting(0):  # the group's own timeout is to end it
        said = run_ranks(rank, 3, init_process_group=True)[0]
    assert said.startswith("the process group 'kv' of ranks 0, 2 cannot be connected from rank 0: ")


def test_a_group_with_silent_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> None:
        monkeypatch.setattr(dist, "all_reduce", lambda x, group: None)
        with pytest.raises(ConnectError, match=r"the process group 'kv' of ranks 0-1 counts 1 ranks instead of 2"):
            connect({"kv": dist.group.WORLD})

    run_ranks(rank, 2, init_process_group=True)


def test_the_oldest_unfinished_message_is_overdue() -> None:
    watch, ended = Watch(), []
    with watch.blocking(lambda: "the first"):
        pass
    assert watch.overdue(0) is None
    watch._add(lambda: "the second", lambda: bool(ended))
    watch._add(lambda: "the third", lambda: False)
    time.sleep(0.02)
    assert watch.overdue(5) is None
    assert watch.overdue(0.01) == "the second has not ended after 0 s"
    ended.append(True)
    assert watch.overdue(0.01) == "the third has not ended after 0 s"


def test_several_tensors_are_one_launch_without_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NCCL: gathers and reductions through torch's coalescing, an all-to-all as one batch of messages."""

    def rank() -> list[list]:
        mesh = GroupMesh.from_group({"cp": 4}, dist.group.WORLD)
        x = torch.arange(8.0).view(4, 2) + 10 * mesh.index
        y = torch.arange(4.0, dtype=torch.bfloat16) - mesh.index
        found = []
        for packs in (True, False):
            if not packs:
                monkeypatch.setattr(GroupMesh, "_packs", lambda *_: False)
            gathered, swapped = mesh.all_gather("cp", (x, y)), mesh.all_to_all("cp", (x, y))
            found.append([t.tolist() for t in (*gathered.wait(), *swapped.wait())])
        assert found[0] == found[1]
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
        return found[0]

    for index, (xs, ys, xt, yt) in enumerate(run_ranks(rank, 4, init_process_group=True)):
        assert xs == [[10 * r + 2 * i, 10 * r + 2 * i + 1] for r in range(4) for i in range(4)]
        assert ys == [i - r for r in range(4) for i in range(4)]
        assert xt == [[10 * r + 2 * index, 10 * r + 2 * index + 1] for r in range(4)]
        assert yt == [index - r for r in range(4)]
