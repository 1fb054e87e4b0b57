"""Buffers in flight: between posting and waiting, nobody reads a receive buffer, writes a send buffer, or frees either.

Every torch operator passes through ``InFlight``, on any device, also without data (``meta``). Other kernels do not; on
ranks with data the bytes tell: receive buffers are poisoned until then, and sent bytes must be unchanged
when the operation is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from equipment.nccl.order import Operation
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cp_plugin.engine.comm.group import as_bytes
from cp_plugin.engine.common.without_data import Mode

POISON = 0xFF
"""Every byte: NaN in floating-point formats, -1 or the largest number in others."""

_SHAPE_ONLY = {
    getattr(torch.ops.aten, name)
    for name in ("empty_like", "new_empty", "new_empty_strided", "zeros_like", "ones_like", "full_like", "new_zeros",
                 "new_ones", "new_full", "detach", "alias", "is_same_size", "lift_fresh", "_unsafe_view")
}  # fmt: skip
"""Operators that are no views to torch but read no element."""


class BufferInFlightError(AssertionError):
    """A buffer in flight was touched: names rank, communicator and operation."""


@dataclass(slots=True, kw_only=True)
class Region:
    """Bytes ``start`` to ``end`` of a storage, sent or received by an operation. Does not keep the storage alive."""

    operation: Operation
    received: bool
    storage: StorageWeakRef
    start: int
    end: int
    copy: Tensor | None = None
    """What was posted, on ranks with data."""

    def overlaps(self, key: int, start: int, end: int) -> bool:
        return self.storage.cdata == key and start < self.end and self.start < end

    def bytes_now(self) -> Tensor:
        """On ranks with data, of a storage that has not been freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return torch.empty(0, dtype=torch.uint8).set_(storage)[self.start : self.end]


class InFlight(Mode):
    """One rank's buffers in flight, checked against every operator it calls."""

    def __init__(self, rank: int, *, data: bool) -> None:
        super().__init__()
        self._rank = rank
        self._data = data
        self._regions: list[Region] = []
        self._looking = True

    def post(self, operation: Operation, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Region]:
        """Put buffers in flight. BufferInFlightError for those already in flight that may not be touched like this."""
        buffers = [*((t, False) for t in sent), *((t, True) for t in received)]
        for t, receiving in buffers:
            self._touched(t, operation, written=receiving)
        with self._unseen():
            made = [self._region(operation, t, receiving) for t, receiving in buffers]
        self._regions += made
        return made

    def end(self, regions: Sequence[Region]) -> None:
        """The operation is waited for: its buffers are free if they are intact."""
        with self._unseen():
            for region in regions:
                if region.storage.expired():
                    raise BufferInFlightError(
                        f"rank {self._rank}: {region.operation}: a buffer was freed before it had been waited for"
                    )
                if region.copy is not None and not torch.equal(region.bytes_now(), region.copy):
                    raise self._error(region, "was written to")
        self._regions = [region for region in self._regions if all(region is not one for one in regions)]

    def deliver(self, region: Region, what: Tensor) -> None:
        """Received data arrives."""
        with self._unseen():
            region.bytes_now().copy_(as_bytes(what.detach().contiguous()))

    def require_all_ended(self) -> None:
        """BufferInFlightError for an operation that was never waited for."""
        if self._regions:
            raise BufferInFlightError(f"rank {self._rank}: {self._regions[0].operation} was never waited for")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._regions and self._looking and not func.is_view and func.overloadpacket not in _SHAPE_ONLY:
            written = _written(func)
            for place, argument in (*enumerate(args), *kwargs.items()):
                for t in argument if isinstance(argument, list | tuple) else (argument,):
                    if isinstance(t, Tensor):
                        self._touched(t, func, written=place in written)
        return func(*args, **kwargs)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """The model's own operators are not checked."""
        self._looking = False
        try:
            yield
        finally:
            self._looking = True

    def _touched(self, t: Tensor, by: object, *, written: bool) -> None:
        key, start, end = _extent(t)
        for region in self._regions:
            if (written or region.received) and region.overlaps(key, start, end):
                toucher = f"posting {by}" if isinstance(by, Operation) else by
                raise self._error(region, f"was {'written to' if written else 'read'} by {toucher}")

    def _error(self, region: Region, done: str) -> BufferInFlightError:
        what = "receives" if region.received else "sends"
        return BufferInFlightError(
            f"rank {self._rank}: {region.operation}: a buffer that it {what} {done} before it had been waited for"
        )

    def _region(self, operation: Operation, t: Tensor, received: bool) -> Region:
        _, start, end = _extent(t)
        storage = StorageWeakRef(t.untyped_storage())
        region = Region(operation=operation, received=received, storage=storage, start=start, end=end)
        if self._data:
            now = as_bytes(t.detach())
            if received:
                now.fill_(POISON)
            region.copy = now.clone()
        return region


def _extent(t: Tensor) -> tuple[int, int, int]:
    """The storage, and its bytes from the first to the last element."""
    first = t.storage_offset()
    last = first + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    end = last + 1 if t.numel() else first
    return t.untyped_storage()._cdata, first * t.element_size(), end * t.element_size()


@cache
def _written(func: Any) -> frozenset[int | str]:
    """Positions and names of the arguments that an operator writes to."""
    places = enumerate(func._schema.arguments)
    written = ((place, one.name) for place, one in places if one.alias_info is not None and one.alias_info.is_write)
    return frozenset(chain.from_iterable(written))
