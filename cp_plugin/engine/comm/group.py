"""GroupMesh: a mesh over torch.distributed process groups, NCCL or Gloo."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.comm.connect import connect
from cp_plugin.engine.comm.mesh import Ledger, Mesh, Pending, Tensors, axis_groups
from cp_plugin.engine.common.text import ranks_named

# torch 2.13 renamed both and warns at the old names
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SHORT = 256 * 1024
"""Bytes. Gloo's all-gather is a ring, each step of which waits for the one before. That saves inter-host bandwidth for
long messages; a short one arrives sooner if it goes to each peer directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A message's identity. ``str``: ``backward exchange along 'ring' with ranks 0, 3``."""

    phase: str
    """``forward`` or ``backward``: of the attention call that posted it."""
    verb: str
    axis: str
    peers: tuple[int, ...]
    """Global ranks."""

    def __str__(self) -> str:
        return f"{self.phase} {self.verb} along {self.axis!r} with {ranks_named(self.peers)}"


class MessageError(RuntimeError):
    """torch.distributed gave up on a message: a peer is gone, or did not join within the timeout."""

    def __init__(self, named: Named, cause: BaseException) -> None:
        super().__init__(f"{named} failed: {cause}")
        self.named = named


class GroupMesh(Mesh):
    """One process group per axis, made by the caller (Megatron's ``create_group``) or by ``from_group``."""

    def __init__(
        self,
        axes: Mapping[str, int],
        groups: Mapping[str, dist.ProcessGroup | None],
        index: int,
        ledger: Ledger | None = None,
    ) -> None:
        """
        Args:
            axes: name -> size, slowest first.
            groups: for each axis the process group along it that contains this rank, in axis order; None is allowed
                for axes of size 1. Further groups as named by ``axis_groups``.
            index: this rank's number in the context-parallel group.

        ValueError if a group is missing or disagrees with its axis.
        """
        super().__init__(axes, index, ledger)
        for name, n in self.axes.items():
            group = groups.get(name)
            have = (1, 0) if group is None else (group.size(), group.rank())
            if have != (n, self.coordinates[name]):
                raise ValueError(
                    f"axis {name!r} needs a process group of {n} ranks with this rank at {self.coordinates[name]}; "
                    f"got {have[0]} ranks with this rank at {have[1]}"
                )
        self.groups = dict(groups)

    @classmethod
    def from_group(
        cls,
        axes: Mapping[str, int],
        group: dist.ProcessGroup | None,
        extra: Sequence[str] = (),
        collective: Collection[str] = (),
    ) -> GroupMesh:
        """A mesh over the ranks of ``group`` (None: one rank), with ``extra`` groups as in ``axis_groups``.

        ``collective``: axes connected for collectives, as in ``connect``; others take them, too, but connect later.

        Collective over the group, which is reused where it has the right ranks. New NCCL groups get high-priority
        streams, so that a message does not wait behind a kernel that fills the device. ConnectError if ranks of a group
        cannot reach each other.
        """
        if group is None:
            return cls(axes, {}, 0)
        ranks = dist.get_process_group_ranks(group)
        groups: dict[str, dist.ProcessGroup | None] = {}
        unused = [group]
        on_nccl = dist.get_backend(group) == "nccl"
        for name, lists in axis_groups(ranks, axes, extra).items():
            own_ranks = next(members for members in lists if dist.get_rank() in members)
            if own_ranks == ranks and unused:
                groups[name] = unused.pop()
            else:
                # torch keeps the options and writes the group's name and timeout into them: each group needs its own
                urgent = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if on_nccl else None
                groups[name] = dist.new_group(
                    own_ranks, use_local_synchronization=True, pg_options=urgent, group_desc=f"cp_plugin_{name}"
                )
        connect(groups, collective=collective)
        return cls(axes, groups, group.rank())

    def _group_name(self, axis: str, group: str) -> str:
        return group if group in self.groups else axis

    def _deliver(
        self, verb: str, axis: str, tensors: Sequence[Tensor], post: Callable[..., Pending], *ends: int | None
    ) -> Pending:
        phase = self.ledger.current_phase

        def named() -> Named:
            return self.name(phase, verb, axis, ends)

        try:
            pending = super()._deliver(verb, axis, tensors, post, *ends)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise MessageError(named(), error) from error

        def finish() -> Tensors:
            try:
                return pending.wait()
            except RuntimeError as error:
                raise MessageError(named(), error) from error

        return Pending(finish)

    def name(self, phase: str, verb: str, axis: str, ends: tuple[int | None, ...]) -> Named:
        """A message's identity. ``ends``: peers as places on the axis; none: all of it."""
        ranks = dist.get_process_group_ranks(self._group(axis))
        own = dist.get_rank()
        peers = {ranks[end] for end in ends if end is not None} if ends else {rank for rank in ranks if rank != own}
        return Named(phase=phase, verb=verb, axis=axis, peers=tuple(sorted(peers)))

    def _exchange(self, axis: str, tensors: Tensors, to: int | None, source: int | None) -> Pending:
        if self._packs(axis, tensors):
            nbytes = sum(t.nbytes for t in tensors)
            packed = tensors[0].new_empty((1, nbytes), dtype=torch.uint8) if to is None else pack(tensors)
            message = self._exchange(axis, (packed,), to, source)
            return _unpacked(message, tensors) if source is not None else message
        group = self._group(axis)
        received = tuple(t.new_empty(t.shape) for t in tensors) if source is not None else ()
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=source) for t in received]
        if to is not None:  # after the receives, see _to_each_peer
            ops += [dist.P2POp(dist.isend, t, group=group, group_peer=to) for t in tensors]
        return _when_done(dist.batch_isend_irecv(ops), tensors, received)

    def _all_gather(self, axis: str, tensors: Tensors) -> Pending:
        group, n = self._group(axis), self.axes[axis]
        if self._packs(axis, tensors):
            return _unpacked(self._all_gather(axis, (pack(tensors),)), tensors, parts=n, times=n)
        received = tuple(t.new_empty((n * t.size(0), *t.shape[1:])) for t in tensors)
        if self._is_gloo(axis) and tensors[0].nbytes <= SHORT:
            return self._to_each_peer(axis, [(t,) * n for t in tensors], received)
        return _when_done([_together(_all_gather_single, group, _bytes(received), _bytes(tensors))], tensors, received)

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        if self._is_gloo(axis):  # whose own reduce-scatter is an all-reduce: twice the bytes
            return super()._reduce_scatter(axis, tensors)
        group, n = self._group(axis), self.axes[axis]
        received = tuple(t.new_empty((t.size(0) // n, *t.shape[1:])) for t in tensors)
        return _when_done([_together(_reduce_scatter_single, group, received, tensors)], tensors, received)

    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending:
        group, n = self._group(axis), self.axes[axis]
        if self._packs(axis, tensors):
            return _unpacked(self._all_to_all(axis, (pack(tensors, n),)), tensors, parts=n)
        received = tuple(t.new_empty(t.shape) for t in tensors)
        if self._is_gloo(axis) or len(tensors) > 1:
            return self._to_each_peer(axis, [t.chunk(n) for t in tensors], received)
        work = dist.all_to_all_single(received[0], tensors[0], group=group, async_op=True)
        return _when_done([work], tensors, received)

    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending:
        arrived = tuple(t.new_empty((sum(received), *t.shape[1:])) for t in tensors)
        parts, places = [t.split(list(sent)) for t in tensors], [t.split(list(received)) for t in arrived]
        return _when_done(self._messages(axis, parts, places), tensors, arrived)

    def _to_each_peer(self, axis: str, parts: Sequence[Tensors], received: Tensors) -> Pending:
        """Part i of each tensor to rank i of the axis. Gloo's own all-to-all takes 1.6 times as long on slow links."""
        n, own = self.axes[axis], self.coordinates[axis]
        places = [t.chunk(n) for t in received]
        for place, part in zip(places, parts, strict=True):
            place[own].copy_(part[own])
        return _when_done(self._messages(axis, parts, places), tuple(chain(*parts)), received)

    def _messages(self, axis: str, parts: Sequence[Tensors], places: Sequence[Tensors]) -> Sequence[Any]:
        """Post one batch (on NCCL one launch): part i of each tensor goes to rank i of the axis, whose part arrives in
        place i. Empty parts are skipped.

        All receives precede all sends: Gloo tells the sender that a receive is ready, and that message would queue
        behind our own data on the same connection.
        """
        group = self._group(axis)
        n, own = group.size(), group.rank()
        above, below = ([(own + sign * i) % n for i in range(1, n)] for sign in (1, -1))
        coming = [(place[peer], peer) for peer in below for place in places if len(place[peer])]
        leaving = [(part[peer], peer) for peer in above for part in parts if len(part[peer])]
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=peer) for t, peer in coming]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=peer) for t, peer in leaving]
        return dist.batch_isend_irecv(ops) if ops else ()

    def _packs(self, axis: str, tensors: Tensors) -> bool:
        return len(tensors) > 1 and self._is_gloo(axis)

    def _is_gloo(self, axis: str) -> bool:
        return dist.get_backend(self._group(axis)) == "gloo"

    def _group(self, axis: str) -> dist.ProcessGroup:
        group = self.groups.get(axis)
        if group is None:
            raise ValueError(f"this mesh was created without the process group {axis!r}; it has {sorted(self.groups)}")
        return group


def _together(collective: Callable[..., Any], group: dist.ProcessGroup, received: Tensors, sent: Tensors) -> Any:
    """Launch a collective of several tensors of one dtype as one; returns what to wait for."""
    if len(sent) == 1:
        return collective(received[0], sent[0], group=group, async_op=True)
    with dist._coalescing_manager(group=group, async_ops=True) as works:
        for r, t in zip(received, sent, strict=True):
            collective(r, t, group=group, async_op=True)
    return works


def _bytes(tensors: Tensors) -> Tensors:
    """The same memory as bytes, so that tensors of several dtypes can be gathered in one launch."""
    return tuple(map(as_bytes, tensors)) if len(tensors) > 1 else tensors


def _when_done(works: Sequence[Any], sent: Tensors, received: Tensors) -> Pending:
    in_flight = [sent]  # send buffers must live until they have been sent

    def finish() -> Tensors:
        for work in works:
            work.wait()
        in_flight.clear()
        return received

    return Pending(finish)


def _unpacked(message: Pending, like: Tensors, parts: int = 1, times: int = 1) -> Pending:
    """The tensors of a packed message, each ``times`` as long as in ``like``."""
    shapes = [(times * t.size(0), *t.shape[1:]) for t in like]
    dtypes = [t.dtype for t in like]
    return Pending(lambda: unpack(message.wait()[0], shapes, dtypes, parts))


def pack(tensors: Sequence[Tensor], parts: int = 1) -> Tensor:
    """Contiguous tensors ``[parts * s_i, ...]`` as bytes ``[parts, n]``: each part has its share of every tensor.

    For Gloo, where a few bytes of log-sum-exp would cost a message of their own; NCCL launches collectives as one.
    """
    return torch.cat([as_bytes(t).view(parts, -1) for t in tensors], 1)


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes ``[n]``.

    ``t.view(torch.uint8)`` alone refuses some: a contiguous tensor may have any stride where its size is 1.
    """
    assert t.is_contiguous()
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def unpack(
    message: Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], parts: int
) -> tuple[Tensor, ...]:
    """The tensors ``[parts * s_i, ...]`` of a message ``[parts, n]``."""
    tensors, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + prod(shape) * dtype.itemsize // parts
        tensors.append(message[:, start:end].clone(memory_format=torch.contiguous_format).view(dtype).view(shape))
        start = end
    return tuple(tensors)
