"""The mesh: named axes of ranks and the verbs that move tensors along them.

A method names an axis and a verb, never a rank or a process group. Three meshes speak the same verbs:

    GroupMesh   torch.distributed process groups (NCCL or Gloo)
    ThreadMesh  ranks as threads of one process: real numbers, any device, no network
    TraceMesh   no peers and no data: shapes and the ledger only

Each verb posts its communication and returns a ``Pending``; ``Pending.wait()`` is the only way to the received tensors,
so communication can be posted before the compute that hides it. A tensor handed to a verb must not be written to until
``wait`` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod

from torch import Tensor

from cp_plugin.mesh.ledger import Ledger

Tensors = tuple[Tensor, ...]


class Pending:
    """Communication under way. ``wait`` may be called once more than needed: it returns the same tensors again."""

    __slots__ = ("_finish", "_tensors")

    def __init__(self, finish: Callable[[], Tensors]) -> None:
        self._finish: Callable[[], Tensors] | None = finish
        self._tensors: Tensors = ()

    def wait(self) -> Tensors:
        """Block (on CUDA: make the current stream wait) until the received tensors are valid, and return them."""
        if self._finish is not None:
            self._tensors, self._finish = self._finish(), None
        return self._tensors


class Mesh(ABC):
    """A grid of ranks. Axes are ordered slowest first: ``index`` is the row-major number of this rank's coordinates."""

    def __init__(self, axes: Mapping[str, int], index: int, ledger: Ledger | None = None) -> None:
        """
        Args:
            axes: name -> size, slowest first; the product is the context-parallel size.
            index: this rank's number among them.
            ledger: where traffic is booked; a new one by default.
        """
        if not axes or any(n < 1 for n in axes.values()):
            raise ValueError(f"a mesh needs axes of size 1 or more, got {dict(axes)}")
        self.axes = dict(axes)
        self.size = prod(self.axes.values())
        if not 0 <= index < self.size:
            raise ValueError(f"rank index {index} is outside the mesh {self.axes} of {self.size} ranks")
        self.index = index
        self.ledger = ledger if ledger is not None else Ledger()
        self.coordinates = coordinates(self.axes, index)

    def neighbours(self, axis: str, ranks: Sequence[int], by: int) -> tuple[int, ...]:
        """The numbers of the ranks ``by`` places up the axis from each of these, cyclically."""
        n, found = self.axes[axis], []
        for rank in ranks:
            at = coordinates(self.axes, rank)
            found.append(flat_index(self.axes, {**at, axis: (at[axis] + by) % n}))
        return tuple(found)

    def exchange(self, axis: str, tensors: Sequence[Tensor], *, to: int, source: int) -> Pending:
        """Send ``tensors`` to rank ``to`` of the axis and receive tensors of the same shapes from rank ``source``."""
        if self.coordinates[axis] == to == source:
            return _done(tensors)
        self.ledger.record("exchange", axis, _nbytes(tensors))
        return self._exchange(axis, _contiguous(tensors), to, source)

    def shift(self, axis: str, tensors: Sequence[Tensor], by: int = 1) -> Pending:
        """Pass ``tensors`` ``by`` places up the axis, cyclically, and receive those of the rank as far below."""
        n, here = self.axes[axis], self.coordinates[axis]
        return self.exchange(axis, tensors, to=(here + by) % n, source=(here - by) % n)

    def all_gather(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """Concatenate each tensor over the ranks of the axis: ``[s, ...] -> [n * s, ...]``, in axis order."""
        n = self.axes[axis]
        if n == 1:
            return _done(tensors)
        self.ledger.record("all_gather", axis, (n - 1) * _nbytes(tensors))
        return self._all_gather(axis, _contiguous(tensors))

    def reduce_scatter(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """Sum each tensor over the ranks of the axis and keep this rank's part: ``[n * s, ...] -> [s, ...]``.

        Pass float32 (or float64) tensors: on NCCL the sum is taken in the dtype that travels.
        """
        n = self.axes[axis]
        if n == 1:
            return _done(tensors)
        _check_divides(axis, n, tensors)
        self.ledger.record("reduce_scatter", axis, (n - 1) * _nbytes(tensors) // n)
        return self._reduce_scatter(axis, _contiguous(tensors))

    def all_to_all(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        """Send the i-th of n equal parts of dimension 0 to rank i of the axis; receive in axis order, same shape."""
        n = self.axes[axis]
        if n == 1:
            return _done(tensors)
        _check_divides(axis, n, tensors)
        self.ledger.record("all_to_all", axis, (n - 1) * _nbytes(tensors) // n)
        return self._all_to_all(axis, _contiguous(tensors))

    @abstractmethod
    def _exchange(self, axis: str, tensors: Tensors, to: int, source: int) -> Pending: ...

    @abstractmethod
    def _all_gather(self, axis: str, tensors: Tensors) -> Pending: ...

    @abstractmethod
    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending: ...

    @abstractmethod
    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending: ...


def coordinates(axes: Mapping[str, int], index: int) -> dict[str, int]:
    """The coordinates of the rank with row-major number ``index``."""
    at = {}
    for name, n in reversed(axes.items()):
        index, at[name] = divmod(index, n)
    return {name: at[name] for name in axes}


def flat_index(axes: Mapping[str, int], at: Mapping[str, int]) -> int:
    """The row-major number of the rank at these coordinates: the inverse of ``coordinates``."""
    index = 0
    for name, n in axes.items():
        index = index * n + at[name]
    return index


def axis_groups(ranks: Sequence[int], axes: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """For every axis, the lists of ranks that differ in that coordinate only, in an order all ranks agree on.

    Args:
        ranks: the (global) ranks of one context-parallel group, in group order.
        axes: the mesh axes, whose product is ``len(ranks)``.
    """
    groups: dict[str, dict[tuple[int, ...], list[int]]] = {name: {} for name in axes}
    for index, rank in enumerate(ranks):
        at = coordinates(axes, index)
        for name in axes:
            others = tuple(at[other] for other in axes if other != name)
            groups[name].setdefault(others, []).append(rank)
    return {name: list(by_others.values()) for name, by_others in groups.items()}


def _done(tensors: Sequence[Tensor]) -> Pending:
    kept = tuple(tensors)
    return Pending(lambda: kept)


def _contiguous(tensors: Sequence[Tensor]) -> Tensors:
    return tuple(t.contiguous() for t in tensors)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _check_divides(axis: str, n: int, tensors: Sequence[Tensor]) -> None:
    for t in tensors:
        if t.size(0) % n:
            raise ValueError(f"dimension 0 of {tuple(t.shape)} cannot be divided over the {n} ranks of axis {axis!r}")
