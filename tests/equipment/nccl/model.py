"""A model of NCCL in one process, as the ``torch.distributed`` that ``cp_plugin.engine.comm`` calls.

``GroupMesh`` itself runs on it with its NCCL branches: it posts, packs, keeps and waits as on GPUs. Two forms of ranks:

    traced    one after the other, best on ``meta``: ``wait`` returns at once. For the order: nothing is received, but
              in messages both ways and in ``all_gather`` all ranks are taken to have sent the same.
    with data threads that exchange small tensors; receive buffers are poisoned. For results and buffers.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any
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


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as seen by its member ``here`` (a place in it)."""

    communicator: Communicator
    here: int

    def size(self) -> int:
        return len(self.communicator.ranks)

    def rank(self) -> int:
        return self.here


@dataclass(slots=True, kw_only=True)
class Rank:
    """A rank under the model."""

    number: int
    hub: Hub | None = None
    """Of ranks with data."""
    trace: Trace = field(init=False)
    in_flight: InFlight = field(init=False)
    coalescing: list[tuple[str, Tensor, Tensor]] | None = None
    """Collectives posted together."""
    phase: Callable[[], str] = field(default=lambda: "")
    counted: dict[Any, int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        self.trace = Trace(self.number)
        self.in_flight = InFlight(self.number, data=self.hub is not None)

    def count(self, key: Any) -> int:
        """How often this was called with a key."""
        self.counted[key] += 1
        return self.counted[key]


_here = threading.local()


def _rank() -> Rank:
    return _here.rank


type Arriving = Callable[[], Tensor]
"""The bytes of a tensor once received."""


class Work:
    """An operation in flight. Keeps no tensor alive."""

    def __init__(self, rank: Rank, regions: Sequence[Region], arriving: Sequence[Arriving]) -> None:
        self._rank, self._regions, self._arriving = rank, regions, arriving

    def wait(self) -> None:
        self._rank.in_flight.end(self._regions)
        received = [region for region in self._regions if region.received]
        for region, arriving in zip(received, self._arriving, strict=self._rank.hub is not None):
            self._rank.in_flight.deliver(region, arriving())


@dataclass(frozen=True, slots=True)
class P2POp:
    op: str
    tensor: Tensor
    group: Group
    group_peer: int


def batch_isend_irecv(operations: Sequence[P2POp]) -> list[Work]:
    """One launch of all operations."""
    communicator, rank = operations[0].group.communicator, _rank()
    assert all(one.group.communicator == communicator for one in operations)
    pieces, sent, received, arriving = [], [], [], []
    for one in operations:
        peer = communicator.ranks[one.group_peer]
        pieces.append(_piece(one.op, one.tensor, peer))
        route = (rank.number, peer) if one.op == "send" else (peer, rank.number)
        key = (communicator, *route, rank.count((communicator, *route)))
        if one.op == "send":
            sent.append(one.tensor)
            _post(key, (one.tensor,))
        else:
            received.append(one.tensor)
            arriving.append(partial(_Received([key], one.op, 0), 0))
    if rank.hub is None:
        for t, like in zip(received, sent, strict=False):
            if t.shape == like.shape:
                t.copy_(like)
    return [_launch(communicator, pieces, sent, received, arriving)]


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
    rank, found = _rank(), SimpleNamespace()
    rank.coalescing = asked = []
    yield found
    rank.coalescing = None
    assert asked and async_ops
    assert len({(verb, sent.dtype) for verb, _, sent in asked}) == 1, "torch coalesces one verb, of one dtype"
    found.wait = _collectives(group, asked).wait


def _collectives(group: Group, asked: Sequence[tuple[str, Tensor, Tensor]]) -> Work:
    communicator, rank = group.communicator, _rank()
    key = ("collective", communicator, rank.count(communicator))
    verbs, received, sent = zip(*asked, strict=True)
    for place in range(group.size()):
        _post((*key, group.here, place), sent)
    combined = _Received([(*key, place, group.here) for place in range(group.size())], verbs[0], group.here)
    arriving = [partial(combined, place) for place in range(len(asked))]
    return _launch(communicator, [_piece(*one) for one in zip(verbs, sent, strict=True)], sent, received, arriving)


class _Received:
    """What a rank receives from the ranks whose messages have these keys: of a collective, or from one of them."""

    def __init__(self, keys: Sequence[Any], verb: str, here: int) -> None:
        self._keys, self._verb, self._here = keys, verb, here
        self._ranks: list[Sequence[Tensor]] = []

    def __call__(self, place: int) -> Tensor:
        self._ranks = self._ranks or [_hub().take(key) for key in self._keys]
        given = [tensors[place] for tensors in self._ranks]
        parts = [t.chunk(len(given))[self._here] for t in given] if self._verb in _OF_PARTS else given
        return torch.stack(parts).sum(0) if "reduce" in self._verb else torch.cat(parts)


_OF_PARTS = ("reduce_scatter", "all_to_all")


def _launch(
    communicator: Communicator,
    pieces: Sequence[Piece],
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
    arriving: Sequence[Arriving],
) -> Work:
    if not all(t.is_contiguous() for t in (*sent, *received)):
        raise ValueError(f"{pieces[0]}: NCCL sends and receives contiguous tensors only")
    rank = _rank()
    operation = rank.trace.post(communicator, tuple(pieces), rank.phase())
    regions = rank.in_flight.post(operation, sent, received)
    return Work(rank, regions, arriving if rank.hub is not None else ())


def _piece(verb: str, t: Tensor, peer: int | None = None) -> Piece:
    return Piece(verb=verb, dtype=dtype_name(t.dtype), elements=t.numel(), peer=peer)


def _hub() -> Hub:
    hub = _rank().hub
    assert hub is not None
    return hub


def _post(key: Any, tensors: Sequence[Tensor]) -> None:
    if _rank().hub is not None:
        _hub().post(key, tuple(t.detach().clone() for t in tensors))


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
    get_process_group_ranks=lambda group: list(group.communicator.ranks),
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
    found = []
    with modelled(), patch.object(agreement, "check", lambda *_: None):  # the numbers of other ranks never come
        for number in range(prod(axes.values())):
            rank = Rank(number=number)
            _run(rank, program, axes, extra, collective if connected else None)
            found.append(rank.trace)
    check(found)
    return found


def run_with_data[T](program: Program[T], axes: Mapping[str, int], extra: Sequence[str] = ()) -> list[T]:
    """``program``'s results on ranks that are threads and exchange tensors, checked against the rules.

    Raises:
        RuntimeError: if a rank raised: its error is the cause.
    """
    hub = Hub(PATIENCE)
    ranks = [Rank(number=number, hub=hub) for number in range(prod(axes.values()))]
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
    _here.rank = rank
    mesh = _mesh(rank, axes, extra)
    rank.phase = lambda: mesh.ledger.current_phase
    with rank.in_flight:
        if collective is not None:
            connect(mesh.groups, collective=collective)
        result = program(mesh)
    rank.in_flight.require_all_ended()
    return result


def beside(axes: Mapping[str, int]) -> GroupMesh:
    """Another mesh of this rank, with unused process groups of its own."""
    return _mesh(_rank(), axes, (), " beside")


def _mesh(rank: Rank, axes: Mapping[str, int], extra: Sequence[str], suffix: str = "") -> GroupMesh:
    groups = {}
    for name, lists in axis_groups(range(prod(axes.values())), axes, extra).items():
        members = next(members for members in lists if rank.number in members)
        groups[name] = Group(Communicator(name + suffix, tuple(members)), members.index(rank.number))
    return GroupMesh(axes, groups, rank.number)
