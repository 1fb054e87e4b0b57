"""PayloadMesh: two-byte payloads travel in one byte an element.

    bfloat16 [s, b, h, d]  ->  e4m3 [s, b, h, d], a power of two for each (block of tokens, batch, head)  ->  bfloat16

Sums and row statistics are float32 and travel as they are. All payloads of a verb are packed straight into one message,
for all ranks by one kernel, and unpacked by one; the number of collectives does not grow. Packing an unpacked tensor
again is exact: hops around a ring add no error. What a rank keeps to itself (an axis of one rank, an exchange with
itself) is not rounded.

If the block divides the tokens of a rank, every part of every message is a whole number of blocks: methods gather and
split shards, but never cut one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cp_plugin.engine.comm.mesh import Mesh, Over, Pending, Tensors
from cp_plugin.engine.core.payload import message_bytes
from cp_plugin.engine.kernels import fused

TWO_BYTES = (torch.bfloat16, torch.float16)
"""Dtypes that are packed."""


Parts = Callable[[Tensor], tuple[int, ...]]
"""The tokens of a tensor that each part of a message has."""


def _whole(t: Tensor) -> tuple[int, ...]:
    return (len(t),)


def rounded(x: Tensor, block: int) -> Tensor:
    """``x [s, b, h, d]`` rounded to e4m3 once, as it arrives."""
    return fused.unpack(*fused.pack(x, block), block, x.dtype)


class PayloadMesh(Over):
    """A mesh on another one, on which bfloat16 and float16 tensors ``[tokens, batch, heads, size]`` are packed."""

    def __init__(self, mesh: Mesh, block: int) -> None:
        """block: tokens that share an exponent."""
        super().__init__(mesh)
        self._block = block

    def exchange(self, axis: str, tensors: Sequence[Tensor], *, to: int, source: int, group: str = "") -> Pending:
        if self._place(axis) == to == source:
            return Pending.done(tuple(tensors))
        message = super().exchange(axis, self._closed(tensors), to=to, source=source, group=group)
        return self._opened(message, tensors)

    def send(self, axis: str, tensors: Sequence[Tensor], to: int) -> Pending:
        return super().send(axis, self._closed(tensors), to)

    def receive(self, axis: str, like: Sequence[Tensor], source: int) -> Pending:
        packed = list(filter(_packed, like))
        nbytes = message_bytes(list(map(_shape, packed)), list(map(len, packed)), self._block)
        message = [like[0].new_empty(nbytes, dtype=torch.uint8)] if packed else []
        return self._opened(super().receive(axis, (*message, *_others(like)), source), like)

    def all_gather(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        n = self.axes[axis]
        if n == 1:
            return Pending.done(tuple(tensors))
        return self._opened(super().all_gather(axis, self._closed(tensors)), tensors, lambda t: (len(t),) * n)

    def all_to_all(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        n = self.axes[axis]
        if n == 1:
            return Pending.done(tuple(tensors))

        def parts(t: Tensor) -> tuple[int, ...]:
            return (len(t) // n,) * n

        return self._opened(super().all_to_all(axis, self._closed(tensors, parts)), tensors, parts)

    def all_to_all_v(
        self, axis: str, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: str = ""
    ) -> Pending:
        """The last block of the rows for a rank may be short."""
        if not all(map(_packed, tensors)):
            return super().all_to_all_v(axis, tensors, sent, received, group)
        leaving, coming = (
            [message_bytes(list(map(_shape, tensors)), [rows] * len(tensors), self._block) for rows in side]
            for side in (sent, received)
        )
        message = self._closed(tensors, lambda t: tuple(sent))
        pending = super().all_to_all_v(axis, message, leaving, coming, group)
        return self._opened(pending, tensors, lambda t: tuple(received))

    def _closed(self, tensors: Sequence[Tensor], parts: Parts = _whole) -> Tensors:
        """Return what travels: one message of all payloads, if there are any, then the other tensors."""
        packed = list(filter(_packed, tensors))
        message = (fused.pack_message(packed, list(map(parts, packed)), self._block),) if packed else ()
        return (*message, *_others(tensors))

    def _opened(self, pending: Pending, like: Sequence[Tensor], parts: Parts = _whole) -> Pending:
        """The tensors of such a message, in the order of ``like`` and of its dtypes.

        parts: tokens of each tensor in each part that arrives.
        """
        packed = list(filter(_packed, like))
        form = list(map(_shape, packed)), [t.dtype for t in packed], list(map(parts, packed)), self._block
        which = list(map(_packed, like))

        def finish() -> Tensors:
            message, *others = pending.wait() if packed else (None, *pending.wait())
            unpacked, rest = iter(fused.unpack_message(message, *form) if packed else ()), iter(others)
            return tuple(next(unpacked if of_message else rest) for of_message in which)

        return Pending(finish)


def _shape(t: Tensor) -> tuple[int, int, int]:
    """Without tokens."""
    _, b, h, d = t.shape
    return b, h, d


def _packed(t: Tensor) -> bool:
    return t.dtype in TWO_BYTES


def _others(tensors: Sequence[Tensor]) -> Tensors:
    return tuple(t for t in tensors if not _packed(t))
