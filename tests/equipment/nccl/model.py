"""A model of NCCL in one process, as the ``torch.distributed`` that ``cp_plugin.engine.comm`` calls.

``GroupMesh`` itself runs on it with its NCCL branches: it posts, packs, keeps and waits as on GPUs. Two forms of ranks:

    traced    one after the other, best on ``meta``: ``wait`` returns at once. For the order: nothing is received, but
              in messages both ways and in ``all_gather`` all ranks are taken to have sent the same.
    with data threads that exchange small tensors; receive buffers are poisoned. For results and buffers.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from equipment.nccl.buffers import InFlight, Region
from equipment.nccl.order import Communicator, Piece, Trace, check
from torch import Tensor

from cp_plugin.engine.attention import agreement
from cp_plugin.engine.comm import GroupMesh, axis_groups, connect
from cp_plugin.engine.comm import group as mesh_group
from cp_plugin.engine.comm.threads import Hub, take_turns
from cp_plugin.engine.core.dtypes import dtype_name

PATIENCE = 60.0
"""Seconds that a rank with data waits for a message."""


class Group(Communicator):
    """A process group, as seen by the rank that runs."""

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(_rank().number)


class Rank:
    """A rank under the model; ``hub``: of ranks with data."""

    def __init__(self, number: int, hub: Hub | None = None) -> None:
        self.number, self.hub = number, hub
        self.trace, self.in_flight = Trace(number), InFlight(number, data=hub is not None)
        self.coalescing: list[tuple[str, Tensor, Tensor]] | None = None
        """Collectives posted together."""
        self.phase: Callable[[], str] = lambda: ""
        self._counted: Counter[Any] = Counter()

    def count(self, key: Any) -> int:
        """How often this was called with a key."""
        self._counted[key] += 1
        return self._counted[key]


_thread = threading.local()


def _rank() -> Rank:
    return _thread.rank


type Arriving = Callable[[], Sequence[Tensor]]
"""What a rank with data receives, once it is there."""


class Work:
    """An operation in flight. Keeps no tensor alive."""

    def __init__(self, rank: Rank, regions: Sequence[Region], arriving: Arriving) -> None:
        self._rank, self._regions, self._arriving = rank, regions, arriving

    def wait(self) -> None:
        self._rank.in_flight.end(self._regions)
        if self._rank.hub is not None:
            received = [region for region in self._regions if region.received]
            for region, tensor in zip(received, self._arriving(), strict=True):
                self._rank.in_flight.deliver(region, tensor)


class P2POp(NamedTuple):
    op: str
    tensor: Tensor
    group: Group
    group_peer: int


def batch_isend_irecv(operations: Sequence[P2POp]) -> list[Work]:
    """One launch of all operations."""
    group, rank = operations[0].group, _rank()
    assert all(one.group == group for one in operations)
    pieces, sent, received, keys = [], [], [], []
    for one in operations:
        peer = group.ranks[one.group_peer]
        pieces.append(_piece(one.op, one.tensor, peer))
        route = (group, rank.number, peer) if one.op == "send" else (group, peer, rank.number)
        key = (*route, rank.count(route))
        if one.op == "send":
            sent.append(one.tensor)
            _post(key, (one.tensor,))
        else:
            received.append(one.tensor)
            keys.append(key)
    if rank.hub is None:
        for t, like in zip(received, sent, strict=False):
            if t.shape == like.shape:
                t.copy_(like)
    return [_launch(group, pieces, sent, received, lambda: [_take(key)[0] for key in keys])]


def collective(verb: str) -> Callable[..., Work | None]:
    """``f(received, sent, group=, async_op=True)``."""

    def call(received: Tensor, sent: Tensor, *, group: Group, async_op: bool) -> Work | None:
        assert async_op, "the mesh never blocks"
        coalescing = _rank().coalescing
        if coalescing is None:
            return _collectives(group, [(verb, received, sent)])
        coalescing.append((verb, received, sent))
        return None

    return call


def all_gather(received: Sequence[Tensor], sent: Tensor, group: Group) -> None:
    """Immediate."""
    everything = torch.cat([sent] * len(received))
    _collectives(group, [("all_gather", everything, sent)]).wait()
    for t, part in zip(received, everything.chunk(len(received)), strict=True):
        t.copy_(part)


@contextmanager
def _coalescing_manager(group: Group, async_ops: bool) -> Iterator[SimpleNamespace]:
    rank, work = _rank(), SimpleNamespace()
    rank.coalescing = calls = []
    yield work
    rank.coalescing = None
    assert calls and async_ops
    assert len({(verb, sent.dtype) for verb, _, sent in calls}) == 1, "torch coalesces one verb, of one dtype"
    work.wait = _collectives(group, calls).wait


def _collectives(group: Group, calls: Sequence[tuple[str, Tensor, Tensor]]) -> Work:
    key, own, places = ("collective", group, _rank().count(group)), group.rank(), range(group.size())
    verbs, received, sent = zip(*calls, strict=True)
    for place in places:
        _post((*key, own, place), sent)

    def arriving() -> list[Tensor]:
        by_tensor = zip(*(_take((*key, place, own)) for place in places), strict=True)
        return [_combined(verbs[0], own, tensors) for tensors in by_tensor]

    return _launch(group, [_piece(*one) for one in zip(verbs, sent, strict=True)], sent, received, arriving)


def _combined(verb: str, own: int, tensors: Sequence[Tensor]) -> Tensor:
    """What the rank at place ``own`` receives of what all ranks of the group have sent."""
    if verb in ("reduce_scatter", "all_to_all"):
        tensors = [t.chunk(len(tensors))[own] for t in tensors]
    return torch.stack(tensors).sum(0) if "reduce" in verb else torch.cat(tensors)


def _launch(
    group: Group, pieces: Sequence[Piece], sent: Sequence[Tensor], received: Sequence[Tensor], arriving: Arriving
) -> Work:
    if not all(t.is_contiguous() for t in (*sent, *received)):
        raise ValueError(f"{pieces[0]}: NCCL sends and receives contiguous tensors only")
    rank = _rank()
    operation = rank.trace.post(group, tuple(pieces), rank.phase())
    return Work(rank, rank.in_flight.post(operation, sent, received), arriving)


def _piece(verb: str, t: Tensor, peer: int | None = None) -> Piece:
    return Piece(verb=verb, dtype=dtype_name(t.dtype), elements=t.numel(), peer=peer)


def _take(key: Any) -> Sequence[Tensor]:
    hub = _rank().hub
    assert hub is not None
    return hub.take(key)


def _post(key: Any, tensors: Sequence[Tensor]) -> None:
    hub = _rank().hub
    if hub is not None:
        hub.post(key, tuple(t.detach().clone() for t in tensors))


_DIST = SimpleNamespace(
    P2POp=P2POp,
    isend="send",
    irecv="receive",
    batch_isend_irecv=batch_isend_irecv,
    all_to_all_single=collective("all_to_all"),
    all_gather=all_gather,
    _coalescing_manager=_coalescing_manager,
    get_backend=lambda _: "nccl",
    get_rank=lambda: _rank().number,
    get_process_group_ranks=lambda group: list(group.ranks),
)


@contextmanager
def modelled() -> Iterator[None]:
    """Meanwhile ``cp_plugin.engine.comm`` calls the model."""
    with (
        patch.object(mesh_group, "dist", _DIST),
        patch.object(mesh_group, "_all_gather_single", collective("all_gather")),
        patch.object(mesh_group, "_reduce_scatter_single", collective("reduce_scatter")),
        patch.object(sys.modules["cp_plugin.engine.comm.connect"], "dist", _DIST),
    ):
        yield


type Program[T] = Callable[[GroupMesh], T]


def run_checked(
    program: Program[object],
    axes: Mapping[str, int],
    extra: Sequence[str] = (),
    *,
    collective: Collection[str] = (),
    connected: bool = True,
) -> list[Trace]:
    """What every rank of a mesh with these axes and extra groups posts in ``program``, run one after the other.

    connected: groups are connected where they are made, as ``cp_plugin.megatron.groups`` does: those of
        ``collective`` for collectives.

    Raises:
        BufferInFlightError: for a buffer touched in flight.
        OrderError: for what NCCL would not carry out.
    """
    traces = []
    with modelled(), patch.object(agreement, "check", lambda *_: None):  # the numbers of other ranks never come
        for number in range(prod(axes.values())):
            rank = Rank(number)
            _run(rank, program, axes, extra, collective if connected else None)
            traces.append(rank.trace)
    check(traces)
    return traces


def run_with_data[T](program: Program[T], axes: Mapping[str, int], extra: Sequence[str] = ()) -> list[T]:
    """``program``'s results on ranks that are threads and exchange tensors, checked against the rules.

    Raises:
        RuntimeError: if a rank raised: its error is the cause.
    """
    hub = Hub(PATIENCE)
    ranks = [Rank(number, hub) for number in range(prod(axes.values()))]
    with modelled():
        results = take_turns([partial(_run, rank, program, axes, extra, ()) for rank in ranks], hub)
    check([rank.trace for rank in ranks])
    return results


def _run[T](
    rank: Rank,
    program: Program[T],
    axes: Mapping[str, int],
    extra: Sequence[str],
    collective: Collection[str] | None,
) -> T:
    """collective: None: groups are not connected."""
    _thread.rank = rank
    mesh = _mesh(rank, axes, extra)
    rank.phase = lambda: mesh.ledger.current_phase
    with rank.in_flight:
        if collective is not None:
            connect(mesh.groups, collective=collective)
        result = program(mesh)
    rank.in_flight.require_all_ended()
    return result


def second_mesh(axes: Mapping[str, int]) -> GroupMesh:
    """Another mesh of this rank, with unused process groups of its own."""
    return _mesh(_rank(), axes, (), " beside")


def _mesh(rank: Rank, axes: Mapping[str, int], extra: Sequence[str], suffix: str = "") -> GroupMesh:
    groups = {}
    for name, lists in axis_groups(range(prod(axes.values())), axes, extra).items():
        groups[name] = Group(name + suffix, next(tuple(members) for members in lists if rank.number in members))
    return GroupMesh(axes, groups, rank.number)
