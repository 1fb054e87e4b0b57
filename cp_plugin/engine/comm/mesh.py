"""The mesh: named axes of ranks and the verbs that move tensors along them.

A method names an axis and a verb, never a rank or a process group. Three meshes implement the verbs:

    GroupMesh   torch.distributed process groups (NCCL or Gloo)
    ThreadMesh  ranks as threads of one process: real numbers, any device, no network
    TraceMesh   no peers: zeros of the right shape and the ledger only

Each verb posts its communication and returns a ``Pending``, whose ``wait()`` is the only way to the received tensors;
so communication can be posted before the compute that hides it. A tensor passed to a verb must not be written to until
``wait`` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from cp_plugin.engine.core.dtypes import accumulation_dtype


class Traffic(NamedTuple):
    """A line of the ledger."""

    phase: str
    """``forward``, ``backward``, or any name given to ``Ledger.phase``."""
    op: str
    """The verb: exchange, send, all_gather, reduce_scatter, all_to_all or all_to_all_v."""
    axis: str
    calls: int
    bytes: int


class Ledger:
    """Totals per (phase, verb, axis); its size does not grow with the number of steps.

    Every verb of every mesh records here, so that a real run, a traced run and a closed formula can be held equal.
    Bytes are exact and count what this rank *sends* with a bandwidth-optimal algorithm (for all verbs it receives as
    many).
    """

    def __init__(self) -> None:
        self.current_phase = "forward"
        """The phase under which traffic is recorded now."""
        self._counts: dict[tuple[str, str, str], tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record everything sent inside the ``with`` block under ``name``."""
        outer, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = outer

    def record(self, op: str, axis: str, nbytes: int) -> None:
        """Record one call of a verb."""
        calls, sent = self._counts.get((self.current_phase, op, axis), (0, 0))
        self._counts[self.current_phase, op, axis] = calls + 1, sent + nbytes

    def entries(self) -> list[Traffic]:
        """All lines, sorted by phase, verb and axis."""
        return [Traffic(*key, *count) for key, count in sorted(self._counts.items())]

    def bytes(self, *, phase: str | None = None) -> int:
        """Bytes sent, optionally of one phase only."""
        return sum(line.bytes for line in self.entries() if phase in (None, line.phase))

    def reset(self) -> None:
        self._counts.clear()


Tensors = tuple[Tensor, ...]
WHOLE = "all"
"""The name of the whole mesh in the ledger, and of its process group."""


def sums(axis: str) -> str:
    """The name of a second process group along an axis, for sums that travel in parallel with other messages."""
    return f"{axis}_sums"


class Pending[T]:
    """Communication under way, of tensors or of a value made of them. ``wait`` may be called again."""

    __slots__ = ("_finish", "_received")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._received: T

    @classmethod
    def done(cls, kept: T) -> Pending[T]:
        """Nothing to wait for."""
        return cls(lambda: kept)

    def then(self: Pending[Tensors], fn: Callable[[Tensor], Tensor]) -> Pending[Tensors]:
        """The same with ``fn`` applied to each tensor on arrival."""
        return Pending(lambda: tuple(fn(t) for t in self.wait()))

    def wait(self) -> T:
        """Block (on CUDA: make the current stream wait) until the received tensors are valid, and return them."""
        if self._finish is not None:
            self._received, self._finish = self._finish(), None
        return self._received


class Mesh(ABC):
    """A grid of ranks. Axes are ordered slowest first: ``index`` is the row-major number of the rank's coordinates."""

    def __init__(self, axes: Mapping[str, int], index: int, ledger: Ledger | None = None) -> None:
        """
        Args:
            axes: name -> size, slowest first; the product is the context-parallel size.
            index: this rank's number.
            ledger: where traffic is recorded; a new one by default.
        """
        if not axes or any(n < 1 for n in axes.values()):
            raise ValueError(f"mesh axes must have size 1 or more, got {dict(axes)}")
        self.axes = dict(axes)
        self.size = prod(self.axes.values())
        if not 0 <= index < self.size:
            raise ValueError(f"rank index {index} is outside the mesh {self.axes} of {self.size} ranks")
        self.index = index
        self.ledger = ledger if ledger is not None else Ledger()
        self.coordinates = coordinates(self.axes, index)

    def neighbour(self, axis: str, rank: int, by: int) -> int:
        """The rank ``by`` places up the axis from ``rank``, cyclically."""
        at = coordinates(self.axes, rank)
        return flat_index(self.axes, {**at, axis: (at[axis] + by) % self.axes[axis]})

    def row(self, axis: str, rank: int) -> list[int]:
        """All ranks along the axis through ``rank``, in axis order."""
        at = coordinates(self.axes, rank)
        return [flat_index(self.axes, {**at, axis: i}) for i in range(self.axes[axis])]

    def exchange(self, axis: str, tensors: Sequence[Tensor], *, to: int, source: int, group: str = "") -> Pending:
        """Send ``tensors`` to rank ``to`` of the axis and receive tensors of the same shapes from rank ``source``.

        Along ``WHOLE`` these are ranks of the whole mesh, which needs that process group. ``group``: another process
        group along the axis, if the mesh has it, such as ``sums(axis)``.
        """
        if self._place(axis) == to == source:
            return Pending.done(tuple(tensors))
        self.ledger.record("exchange", axis, nbytes_of(tensors))
        return self._deliver("exchange", self._group_name(axis, group), tensors, self._exchange, to, source)

    def send(self, axis: str, tensors: Sequence[Tensor], to: int) -> Pending:
        """Send ``tensors`` to rank ``to`` of the axis, which must ``receive`` them. ``wait`` returns nothing."""
        self.ledger.record("send", axis, nbytes_of(tensors))
        return self._deliver("send", axis, tensors, self._exchange, to, None)

    def receive(self, axis: str, like: Sequence[Tensor], source: int) -> Pending:
        """Receive tensors of the shapes and dtypes of ``like`` from rank ``source`` of the axis."""
        return self._deliver("receive", axis, like, self._exchange, None, source)

    def shift(self, axis: str, tensors: Sequence[Tensor], by: int = 1, group: str = "") -> Pending:
        """Pass ``tensors`` ``by`` places up the axis, cyclically, and receive those of the rank as far below."""
        n, place = self.axes[axis], self.coordinates[axis]
        return self.exchange(axis, tensors, to=(place + by) % n, source=(place - by) % n, group=group)

    def all_gather(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """Concatenate each tensor over the axis: ``[s, ...] -> [n * s, ...]``, in axis order."""
        n = self.axes[axis]
        if n == 1:
            return Pending.done(tuple(tensors))
        self.ledger.record("all_gather", axis, (n - 1) * nbytes_of(tensors))
        return self._deliver("all_gather", axis, tensors, self._all_gather)

    def reduce_scatter(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """Sum each tensor over the axis and keep this rank's part: ``[n * s, ...] -> [s, ...]``.

        Parts travel, and are summed, in the accumulation dtype.
        """
        if self.axes[axis] == 1:
            return Pending.done(tuple(tensors))
        return self._sum_and_scatter(axis, [t.to(accumulation_dtype(t.dtype)) for t in tensors])

    def _sum_and_scatter(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """``reduce_scatter`` in the given dtype: NCCL also sums in it and returns it, Gloo and threads sum wider."""
        n = self.axes[axis]
        _check_divides(axis, n, tensors)
        self.ledger.record("reduce_scatter", axis, (n - 1) * nbytes_of(tensors) // n)
        return self._deliver("reduce_scatter", axis, tensors, self._reduce_scatter)

    def all_to_all(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """Send the i-th of n equal parts of dimension 0 to rank i of the axis; receive in axis order, same shape."""
        n = self.axes[axis]
        if n == 1:
            return Pending.done(tuple(tensors))
        _check_divides(axis, n, tensors)
        self.ledger.record("all_to_all", axis, (n - 1) * nbytes_of(tensors) // n)
        return self._deliver("all_to_all", axis, tensors, self._all_to_all)

    def all_to_all_v(
        self, axis: str, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: str = ""
    ) -> Pending:
        """Send the first ``sent[0]`` rows of dimension 0 to rank 0 of the axis, the next ``sent[1]`` to rank 1, and so
        on; receive ``received[i]`` rows from rank i, in axis order.

        A rank sends itself nothing; ranks without rows for each other exchange no message. ValueError if the rows do
        not add up to the tensors, or some are for this rank itself.

        group: another process group along the axis, as for ``exchange``.
        """
        place = self.coordinates[axis]
        if sent[place] or received[place] or any(t.size(0) != sum(sent) for t in tensors):
            raise ValueError(
                f"all_to_all_v of {[tuple(t.shape) for t in tensors]}: sends {list(sent)} rows and receives "
                f"{list(received)}, of which rank {place} has none for itself"
            )
        if any(sent):
            self.ledger.record("all_to_all_v", axis, nbytes_of(tensors))
        peers = tuple(i for i, rows in enumerate(zip(sent, received, strict=True)) if any(rows))

        def post(axis: str, tensors: Tensors, *peers: int) -> Pending:
            return self._all_to_all_v(axis, tensors, sent, received)

        return self._deliver("all_to_all_v", self._group_name(axis, group), tensors, post, *peers)

    def _place(self, axis: str) -> int:
        """This rank's place on the axis, or in the whole mesh."""
        return self.index if axis == WHOLE else self.coordinates[axis]

    def _deliver(
        self, verb: str, axis: str, tensors: Sequence[Tensor], post: Callable[..., Pending], *ends: int | None
    ) -> Pending:
        """``post(axis, tensors, *ends)``; a mesh whose messages can fail names the one that did."""
        return post(axis, tuple(tensors if verb == "receive" else (t.contiguous() for t in tensors)), *ends)

    def _group_name(self, axis: str, group: str) -> str:
        """The process group of a message along the axis: the requested one if it exists, or the axis's own."""
        return axis

    @abstractmethod
    def _exchange(self, axis: str, tensors: Tensors, to: int | None, source: int | None) -> Pending:
        """Send ``tensors`` to a rank (None: to none) and receive others like them from a rank (None: from none)."""

    @abstractmethod
    def _all_gather(self, axis: str, tensors: Tensors) -> Pending: ...

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        n = self.axes[axis]
        return self._all_to_all(axis, tensors).then(
            lambda t: t.view(n, t.size(0) // n, *t.shape[1:]).sum(0, dtype=accumulation_dtype(t.dtype))
        )

    @abstractmethod
    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending: ...

    @abstractmethod
    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending: ...


def coordinates(axes: Mapping[str, int], index: int) -> dict[str, int]:
    """The coordinates of the rank with row-major number ``index``."""
    at = {}
    for name, n in reversed(tuple(axes.items())):
        index, at[name] = divmod(index, n)
    return {name: at[name] for name in axes}


def flat_index(axes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """The row-major number of the rank at these coordinates: the inverse of ``coordinates``."""
    index = 0
    for name, n in axes.items():
        index = index * n + at[name]
    return index


def axis_groups(ranks: Sequence[int], axes: Mapping[str, int], extra: Sequence[str] = ()) -> dict[str, list[list[int]]]:
    """Return, for every axis of more than one rank, the lists of ranks that differ in that coordinate only.

    All ranks get the same lists in the same order.

    Args:
        ranks: the (global) ranks of one context-parallel group, in group order.
        axes: the mesh axes, whose product is ``len(ranks)``.
        extra: ``WHOLE`` adds one list of all ranks, ``sums(axis)`` the lists of the axis again.
    """
    placed = np.reshape(ranks, tuple(axes.values()))
    groups = {
        name: np.moveaxis(placed, axis, -1).reshape(-1, n).tolist()
        for axis, (name, n) in enumerate(axes.items())
        if n > 1
    }
    again = {sums(name): lists for name, lists in groups.items() if sums(name) in extra}
    whole = {WHOLE: [list(ranks)]} if WHOLE in extra and len(ranks) > 1 else {}
    return {**groups, **again, **whole}


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _check_divides(axis: str, n: int, tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        if t.size(0) % n:
            raise ValueError(
                f"dimension 0 of {tuple(t.shape)} cannot be split evenly across the {n} ranks of axis {axis!r}"
            )


class TraceMesh(Mesh):
    """One rank of a mesh without peers or data: zeros of the right shape, best on the ``meta`` device, and the ledger.

    Running a method on it prices the method itself; on a real device it measures the computation alone.
    """

    def _exchange(self, axis: str, tensors: Tensors, to: int | None, source: int | None) -> Pending:
        return self._arriving(() if source is None else tensors)

    def _all_gather(self, axis: str, tensors: Tensors) -> Pending:
        return self._arriving(tensors, lambda rows: self.axes[axis] * rows)

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        return self._arriving(tensors, lambda rows: rows // self.axes[axis])

    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending:
        return self._arriving(tensors)

    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending:
        return self._arriving(tensors, lambda rows: sum(received))

    def _arriving(self, like: Tensors, rows: Callable[[int], int] = int) -> Pending:
        """Tensors like these; rows: of one that is sent -> of the one that arrives."""
        return Pending(lambda: tuple(t.new_zeros((rows(t.size(0)), *t.shape[1:])) for t in like))


def below(verb: str) -> Callable[..., Any]:
    """A method of ``Over`` that is left to the mesh below."""
    return lambda self, *args, **named: getattr(self._mesh, verb)(*args, **named)


class Over(Mesh):
    """Base of meshes on another one: verbs may change what travels; posting, names and the ledger are those below."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.axes, mesh.index, mesh.ledger)
        self._mesh = mesh

    _deliver, _group_name = below("_deliver"), below("_group_name")
    _exchange, _all_gather, _reduce_scatter = below("_exchange"), below("_all_gather"), below("_reduce_scatter")
    _all_to_all, _all_to_all_v = below("_all_to_all"), below("_all_to_all_v")
