"""Planted faults of every kind, each reported by the model with rank, communicator and operation."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from equipment.nccl import model, programs
from equipment.nccl.buffers import POISON, BufferInFlightError
from equipment.nccl.model import run_checked, run_with_data
from equipment.nccl.order import OrderError
from oracle import Case

from cp_plugin.engine.comm import GroupMesh, Mesh
from cp_plugin.engine.comm import group as mesh_group

GRID = {"row": 2, "col": 2}


def ones() -> torch.Tensor:
    return torch.ones(4, 2)


# Order


def test_a_rank_that_stays_out_of_a_groups_first_operation() -> None:
    """ATTENTION2D's exchange of shards, in groups that nobody has connected."""
    case = Case(seq_length=16, heads=4, kv_heads=4, causal=True, batch=1, head_dim=8, v_head_dim=8)
    options = {"layout": "striped", "grid": (2, 2)}
    axes, extra = programs.meshes("attention2d", 4, case, **options)
    program = programs.attention("attention2d", case, **options)
    with pytest.raises(OrderError, match=r"rank 1: forward .* 'all' of ranks 0-3.* ranks 0, 3 have no operation"):
        run_checked(program, axes, extra, connected=False)


def gathered_crosswise(mesh: Mesh) -> None:
    for axis in sorted(GRID, reverse=mesh.index in (0, 3)):
        mesh.all_gather(axis, (ones(),)).wait()


def first_messages_crosswise(mesh: Mesh) -> None:
    """Nothing waits for them but the host, inside NCCL, since no message went between these two ranks before."""
    if mesh.index in (0, 2):
        peer = 2 - mesh.index
        names = ("row", "row_sums")[:: 1 - mesh.index]
        for posted in [mesh.exchange("row", (ones(),), to=peer, source=peer, group=name) for name in names]:
            posted.wait()


def both_ways_and_one_by_one(mesh: Mesh) -> None:
    """Between opposite ranks; on a stream each way arrives."""
    peer = 2 - mesh.index
    if mesh.index == 0:
        mesh.exchange("row", (ones(),), to=peer, source=peer).wait()
    elif mesh.index == 2:
        mesh.receive("row", (ones(),), peer).wait()
        mesh.send("row", (ones(),), peer).wait()


def other_verbs(mesh: Mesh) -> None:
    (mesh.all_gather if mesh.index else mesh.all_to_all)("row", (ones(),)).wait()


def crossed(mesh: Mesh) -> None:
    """Each rank sends along one axis what the other waits for, after it has received along the other axis."""
    first, second = ("row", "row_sums") if mesh.index == 0 else ("row_sums", "row")
    peer = 1 - mesh.index
    mesh._deliver("receive", first, (ones(),), mesh._exchange, None, peer).wait()
    mesh._deliver("send", second, (ones(),), mesh._exchange, peer, None).wait()


def sent_before_received(mesh: Mesh) -> None:
    """Not in one batch: nobody has posted what the others send to. Gloo, which keeps what is sent, does not mind."""
    after, before = (mesh.index + 1) % 4, (mesh.index - 1) % 4
    for posted in [mesh.send("row", (ones(),), after), mesh.receive("row", (ones(),), before)]:
        posted.wait()


def sent_to_nobody(mesh: Mesh) -> None:
    if mesh.index == 0:
        mesh.send("row", (ones(),), 1).wait()


ROW = {"row": 2}
BOTH_HOSTS = r"rank 0's host waits in .*'row' of ranks 0-3\) for rank 2 to post .*rank 2's host waits in .*_sums'.* 0"


@pytest.mark.parametrize(
    ("program", "axes", "connected", "message"),
    [
        (gathered_crosswise, GRID, False, r"ranks wait for .* waits for rank \d to make communicator 'col'"),
        (first_messages_crosswise, {"row": 4}, True, BOTH_HOSTS),
        (both_ways_and_one_by_one, {"row": 4}, True, r"rank 0: .* connects the rank opposite in another number of dir"),
        (other_verbs, ROW, True, r"rank 0 posts forward all_to_all of 8 x float32 .* where rank 1 posts forw"),
        (crossed, ROW, True, r"rank 0's forward receive .*'row' .* waits for rank 1's forward send .*rank 1'"),
        (sent_before_received, {"row": 4}, True, r"rank 0's forward send to rank 1 .* waits for rank 1's forward rec"),
        (sent_to_nobody, ROW, True, r"rank 0: forward send to rank 1 of 8 x float32 \(operation 1 of communicator"),
    ],
)
def test_programs_that_nccl_would_not_carry_out(
    program: Callable[[Mesh], None], axes: dict[str, int], connected: bool, message: str
) -> None:
    with pytest.raises(OrderError, match=message):
        run_checked(program, axes, ("row_sums",) if "row" in axes and len(axes) == 1 else (), connected=connected)


# Buffers


def being_received() -> torch.Tensor:
    """The bytes of this rank's receive buffer in flight."""
    return next(region.bytes_now() for region in model._rank().in_flight._regions if region.received)


def read_early(mesh: Mesh) -> None:
    posted = mesh.shift("row", (ones(),))
    being_received() + 1
    posted.wait()


def written_in_flight(mesh: Mesh) -> None:
    x = ones()
    posted = mesh.shift("row", (x,))
    x[1:2].zero_()
    posted.wait()


def never_waited_for(mesh: Mesh) -> None:
    mesh.shift("row", (ones(),))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (read_early, r"rank 0: forward .* receives was read by aten.add.Tensor before"),
        (written_in_flight, r"rank 0: forward .*'row' of ranks 0-1\): a buffer that it sends was written to by"),
        (never_waited_for, r"rank 0: forward .*'row' of ranks 0-1\) was never waited for"),
    ],
)
def test_buffers_in_flight_are_left_alone(program: Callable[[Mesh], None], message: str) -> None:
    with pytest.raises(BufferInFlightError, match=message):
        run_checked(program, ROW)


def test_what_is_received_is_poison_until_then() -> None:
    def program(mesh: Mesh) -> bool:
        posted = mesh.shift("row", (ones(),))
        early = bool((being_received().numpy() == POISON).all())
        return early and bool((posted.wait()[0] == 1).all())

    assert run_with_data(program, {"row": 2}) == [True, True]


def test_a_buffer_that_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh that does not keep what it sends: the memory may have another owner before it has left."""
    kept = mesh_group._when_done
    monkeypatch.setattr(mesh_group, "_when_done", lambda works, sent, received: kept(works, (), received))
    monkeypatch.setattr(GroupMesh, "_deliver", Mesh._deliver)

    def program(mesh: Mesh) -> None:
        x = ones()
        posted = mesh.shift("row", (x,))
        del x
        gc.collect()
        posted.wait()

    with pytest.raises(BufferInFlightError, match=r"rank 0: forward .*'row' of ranks 0-1\): a buffer was freed before"):
        run_checked(program, {"row": 2})
