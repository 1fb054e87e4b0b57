"""The verbs mean the same on every mesh, and every mesh records the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cp_plugin.engine.comm import (
    WHOLE,
    GroupMesh,
    Ledger,
    Mesh,
    Pending,
    TraceMesh,
    axis_groups,
    coordinates,
    flat_index,
    run_threads,
    sums,
)
from cp_plugin.engine.comm.payload import PayloadMesh
from cp_plugin.engine.methods.gradient_dtype import NarrowSums
from cp_plugin.testing.launch import RankError, run_ranks

AXES = {"slow": 2, "fast": 3}


def run_processes(fn: Callable[[Mesh], Any], axes: dict[str, int]) -> list[Any]:
    def rank() -> Any:
        return fn(GroupMesh.from_group(axes, dist.group.WORLD, (WHOLE,)))

    return run_ranks(rank, prod(axes.values()), init_process_group=True)


MESHES = pytest.mark.parametrize("on", [run_processes, run_threads], ids=["processes", "threads"])


def one_of_each_verb(mesh: Mesh) -> list[Any]:
    me = float(mesh.index)
    six = me * 100 + torch.arange(6.0)
    a, b = torch.full((1, 2), me), torch.full((1,), me + 0.5, dtype=torch.bfloat16)
    with mesh.ledger.phase("backward"):
        up = mesh.shift("fast", (a, b))
        back = mesh.shift("slow", (a,), by=-1)
    pair = mesh.exchange("slow", (a,), to=1 - mesh.coordinates["slow"], source=1 - mesh.coordinates["slow"])
    across = mesh.exchange(WHOLE, (a,), to=5 - mesh.index, source=5 - mesh.index)
    gathered = mesh.all_gather("fast", (a, b))
    summed = mesh.reduce_scatter("fast", (six,))
    swapped = mesh.all_to_all("slow", (six,))
    to_above, above, below = mesh.coordinates["fast"] + 1, *((mesh.coordinates["fast"] + by) % 3 for by in (1, -1))
    sent, coming = [[rows if i == at else 0 for i in range(3)] for at, rows in ((above, to_above), (below, below + 1))]
    rows = torch.full((to_above, 2), me)
    dealt = mesh.all_to_all_v("fast", (rows, rows.half()), sent, coming)
    received = [p.wait() for p in (up, back, pair, across, gathered, summed, swapped, dealt)]
    return [[t.tolist() for t in tensors] for tensors in received] + [mesh.ledger.entries()]


@MESHES
def test_verbs_move_what_they_say(on: Callable[..., list[Any]]) -> None:
    """And every mesh records the same traffic."""
    for index, got in enumerate(on(one_of_each_verb, AXES)):
        slow, fast = divmod(index, 3)
        below, other = slow * 3 + (fast - 1) % 3, (1 - slow) * 3 + fast
        row = [slow * 3.0 + c for c in range(3)]
        up, back, pair, across, gathered, summed, swapped, dealt, traffic = got
        trace = TraceMesh(AXES, index)
        one_of_each_verb(trace)
        assert traffic == trace.ledger.entries()
        assert dealt == [[[below] * 2] * ((fast - 1) % 3 + 1)] * 2
        assert up == [[[below] * 2], [below + 0.5]]
        assert back == pair == [[[other] * 2]]
        assert across == [[[5.0 - index] * 2]]
        assert gathered == [[[r] * 2 for r in row], [r + 0.5 for r in row]]
        assert summed == [[sum(row) * 100 + 3 * i for i in (2 * fast, 2 * fast + 1)]]
        column = [fast * 100.0, (3 + fast) * 100.0]
        assert swapped == [[c + 3 * slow + i for c in column for i in range(3)]]


def test_what_stays_is_neither_sent_nor_rounded() -> None:
    """Along an axis of one rank, and in an exchange of a rank with itself."""
    mesh, x = TraceMesh({"one": 1, "cp": 4}, 2), tuple(torch.ones(8, 1, 2, 4, dtype=t) for t in (None, torch.bfloat16))
    for over in (mesh, PayloadMesh(mesh, 4), NarrowSums(mesh, torch.bfloat16)):
        kept = [verb("one", x) for verb in (over.shift, over.all_gather, over.reduce_scatter, over.all_to_all)]
        kept += [over.exchange(axis, x, to=2, source=2, group=sums(axis)) for axis in ("cp", WHOLE)]
        for pending in (*kept, over.shift("one", x, group=sums("one")), over.exchange("cp", x, to=2, source=2)):
            assert all(a is b for a, b in zip(pending.wait(), x, strict=True))
    assert mesh.ledger.entries() == []


def test_coordinates_and_groups_are_row_major() -> None:
    axes = {"a": 2, "b": 3, "c": 2}
    for index in range(12):
        assert flat_index(axes, coordinates(axes, index)) == index
    mesh = TraceMesh(axes, 0)
    assert [mesh.neighbour("b", r, 1) for r in (0, 5)] == [2, 1] and mesh.neighbour("a", 5, -1) == 11
    assert mesh.row("b", 3) == [1, 3, 5]
    ranks = list(range(10, 16))
    groups = {"slow": [[10, 13], [11, 14], [12, 15]], "fast": [[10, 11, 12], [13, 14, 15]]}
    assert axis_groups(ranks, {**AXES, "none": 1}) == groups
    extra = axis_groups(ranks, AXES, (WHOLE, sums("fast"), sums("none")))
    assert extra == {**groups, "fast_sums": groups["fast"], WHOLE: [ranks]}


def test_a_second_group_along_an_axis_is_used_where_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> list[Any]:
        results, used, batch = [], [], dist.batch_isend_irecv
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: used.append(ops[0].group) or batch(ops))
        for extra in ((), (sums("cp"),)):
            mesh = GroupMesh.from_group({"cp": 2}, dist.group.WORLD, extra)
            x = torch.full((2,), float(mesh.index))
            first, second = mesh.shift("cp", (x,)), mesh.shift("cp", (x + 10,), group=sums("cp"))
            results += [sorted(mesh.groups), second.wait()[0].tolist(), first.wait()[0].tolist(), mesh.ledger.bytes()]
            assert used[-2:] == [mesh.groups["cp"], mesh.groups[sums("cp") if extra else "cp"]]
        return results

    for index, got in enumerate(run_ranks(rank, 2, init_process_group=True)):
        other = 1.0 - index
        assert got[1:4] == got[5:] == [[10 + other] * 2, [other] * 2, 16]
        assert (got[0], got[4]) == (["cp"], ["cp", "cp_sums"])


def test_a_group_that_was_not_made_is_named() -> None:
    def rank() -> None:
        mesh = GroupMesh.from_group({"cp": 2}, dist.group.WORLD)
        mesh.exchange(WHOLE, (torch.ones(1),), to=1 - mesh.index, source=1 - mesh.index)

    with pytest.raises(RankError, match=r"created without the process group 'all'; it has \['cp'\]"):
        run_ranks(rank, 2, init_process_group=True)


def test_a_message_is_named_by_global_ranks() -> None:
    """In a group whose places are other numbers than its ranks."""

    def rank() -> list[tuple[int, ...]] | None:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        mesh = GroupMesh.from_group({"cp": 2}, groups[dist.get_rank() % 2])
        other = 1 - mesh.index
        return [mesh.name("forward", "verb", "cp", ends).peers for ends in ((other, other), (None, other), ())]

    assert run_ranks(rank, 4, init_process_group=True) == [[((2, 3, 0, 1)[index],)] * 3 for index in range(4)]


def test_bad_meshes_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the mesh"):
        TraceMesh(AXES, 6)
    with pytest.raises(ValueError, match="mesh axes must have size 1 or more"):
        TraceMesh({}, 0)
    with pytest.raises(ValueError, match="needs a process group of 2 ranks"):
        GroupMesh({"cp": 2}, {}, 0)
    with pytest.raises(ValueError, match="cannot be split evenly across the 3 ranks of axis 'fast'"):
        TraceMesh(AXES, 0).reduce_scatter("fast", (torch.ones(4),))


def test_threads_share_no_memory() -> None:
    """Sent and received tensors may both be written to after ``wait``."""

    def rank(mesh: Mesh) -> list[float]:
        x = torch.full((2,), float(mesh.index))
        (got,) = mesh.shift("cp", (x,)).wait()
        x.fill_(7)
        mesh.shift("cp", (x,)).wait()  # now both have written
        return got.tolist()

    assert run_threads(rank, {"cp": 2}) == [[1.0, 1.0], [0.0, 0.0]]


def test_a_failing_thread_ends_them_all() -> None:
    def rank(mesh: Mesh) -> None:
        if mesh.index == 1:
            raise ZeroDivisionError("planted")
        mesh.shift("cp", (torch.ones(1),)).wait()

    with pytest.raises(RuntimeError, match=r"rank 1 of 3 failed.*planted"):
        run_threads(rank, {"cp": 3})


def test_threads_that_disagree_do_not_hang() -> None:
    def rank(mesh: Mesh) -> None:
        mesh.shift("cp", (torch.ones(1),)).wait()
        if mesh.index == 0:
            mesh.shift("cp", (torch.ones(1),)).wait()

    with pytest.raises(RuntimeError, match="disagree on what to send"):
        run_threads(rank, {"cp": 2}, patience=0.2)


@MESHES
def test_rows_go_only_where_there_are_any(on: Callable[..., list[Any]]) -> None:
    """From rank 0 to rank 2; rank 1 takes no part."""

    def rank(mesh: Mesh) -> list[int]:
        x = torch.arange(3) if mesh.index == 0 else torch.empty(0, dtype=torch.int64)
        sent, received = ([n if mesh.index == at else 0 for n in rows] for at, rows in ((0, (0, 0, 3)), (2, (3, 0, 0))))
        (arrived,) = mesh.all_to_all_v("cp", (x,), sent, received).wait()
        return arrived.tolist()

    assert on(rank, {"cp": 3}) == [[], [], [0, 1, 2]]


def test_rows_that_do_not_add_up_are_refused() -> None:
    mesh, x = TraceMesh({"cp": 2}, 0), torch.ones(3)
    for sent, received in (([0, 2], [0, 0]), ([3, 0], [0, 0]), ([0, 3], [1, 0])):
        with pytest.raises(ValueError, match=r"all_to_all_v of \[\(3,\)\]: sends .* none for itself"):
            mesh.all_to_all_v("cp", (x,), sent, received)


STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda t: torch.stack((t, t), -1)[..., 0],
    "of sizes of one": lambda t: t.as_strided(t.shape, [7 if n == 1 else by for n, by in zip(t.shape, t.stride())]),  # noqa: B905
}
"""The last are contiguous to torch, but ``view`` refuses another dtype."""


@MESHES
def test_tensors_with_any_strides_may_be_sent(on: Callable[..., list[Any]]) -> None:
    assert all(on(with_any_strides, {"cp": 2}))


def with_any_strides(mesh: Mesh) -> bool:
    """Whether every verb delivers contiguous tensors, and the same for other strides of what is sent."""
    shapes = ((4, 2, 1, 3), torch.float32), ((2, 1, 1, 1), torch.float32), ((4, 1, 2, 4), torch.bfloat16)
    plain = [mesh.index + torch.arange(prod(shape)).view(shape).to(dtype) for shape, dtype in shapes]
    meshes = mesh, PayloadMesh(mesh, 2), NarrowSums(mesh, torch.bfloat16)
    want = [_delivered(mesh, plain) for mesh in meshes]
    for restrided in STRIDES.values():
        sent = [restrided(t) for t in plain]
        assert [t.stride() for t in sent] != [t.stride() for t in plain]
        got = [_delivered(mesh, sent) for mesh in meshes]
        assert all(a.is_contiguous() and torch.equal(a, b) for x, y in zip(got, want) for a, b in zip(x, y))  # noqa: B905
    return True


def _delivered(mesh: Mesh, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    other = 1 - mesh.index
    alone, posted = [[t] for t in tensors], list[Pending]()
    for sent in (tensors, *alone):
        posted += [mesh.shift("cp", sent), mesh.shift("cp", sent, group=sums("cp")), mesh.all_gather("cp", sent)]
        posted += [mesh.all_to_all("cp", sent)]
        for sender in range(2):
            posted.append((mesh.send if mesh.index == sender else mesh.receive)("cp", sent, other))
    for sent in alone:
        rows = [len(sent[0]) if i == other else 0 for i in range(2)]
        posted += [mesh.reduce_scatter("cp", sent), mesh.all_to_all_v("cp", sent, rows, rows)]
    return [t for pending in posted for t in pending.wait()]


def test_phases_nest() -> None:
    ledger = Ledger()
    with ledger.phase("a"):
        with ledger.phase("b"):
            ledger.record("exchange", "cp", 1)
        ledger.record("exchange", "cp", 2)
    assert [(t.phase, t.bytes) for t in ledger.entries()] == [("a", 2), ("b", 1)]
