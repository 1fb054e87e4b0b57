"""PayloadMesh: two-byte payloads travel in one byte an element.

    bfloat16 [s, b, h, d]  ->  e4m3 [s, b, h, d], a power of two for each (block of tokens, batch, head)  ->  bfloat16

Sums and row statistics are float32 and travel as they are. All payloads of a verb are packed into one message, so the
number of collectives does not grow. Packing an unpacked tensor again is exact: hops around a ring add no error. What a
rank keeps to itself (an axis of one rank, an exchange with itself) is not rounded.

If the block divides the tokens of a rank, every part of every message is a whole number of blocks: methods gather and
split shards, but never cut one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.comm.mesh import Mesh, Pending, Tensors
from cp_plugin.comm.over import Over
from cp_plugin.comm.packing import pack, unpack
from cp_plugin.kernels import fused

TWO_BYTES = (torch.bfloat16, torch.float16)
"""Dtypes that are packed."""


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
        nbytes = sum(self._nbytes(t) for t in like if _packed(t))
        message = [like[0].new_empty((1, nbytes), dtype=torch.uint8)] if nbytes else []
        return self._opened(super().receive(axis, (*message, *_others(like)), source), like)

    def all_gather(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        n = self.axes[axis]
        if n == 1:
            return Pending.done(tuple(tensors))
        return self._opened(super().all_gather(axis, self._closed(tensors)), tensors, parts=n, times=n)

    def all_to_all(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        n = self.axes[axis]
        if n == 1:
            return Pending.done(tuple(tensors))
        return self._opened(super().all_to_all(axis, self._closed(tensors, parts=n)), tensors, parts=n)

    def all_to_all_v(
        self, axis: str, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: str = ""
    ) -> Pending:
        """Rows for each rank are packed separately; their last block may be short."""
        if not all(map(_packed, tensors)):
            return super().all_to_all_v(axis, tensors, sent, received, group)
        parts = list(zip(*(t.split(list(sent)) for t in tensors), strict=True))
        packed = [self._closed(part)[0].flatten() for part in parts if len(part[0])]
        like = [
            tuple(torch.empty((rows, *t.shape[1:]), dtype=t.dtype, device="meta") for t in tensors) for rows in received
        ]
        leaving, coming = ([sum(map(self._nbytes, part)) for part in side] for side in (parts, like))
        message = torch.cat(packed) if packed else tensors[0].new_empty(0, dtype=torch.uint8)
        pending = super().all_to_all_v(axis, (message,), leaving, coming, group)

        def finish() -> Tensors:
            arrived = zip(pending.wait()[0].split(coming), like, strict=True)
            opened = [self._opened(Pending.done((m[None],)), place).wait() for m, place in arrived if len(m)]
            return tuple(map(torch.cat, zip(*opened, strict=True))) if opened else tuple(t[:0] for t in tensors)

        return Pending(finish)

    def _closed(self, tensors: Sequence[Tensor], parts: int = 1) -> Tensors:
        """What travels: one message ``[parts, bytes]`` of all payloads, if there are any, then the other tensors."""
        packed = [part for t in tensors if _packed(t) for part in fused.pack(t, self._block)]
        message = (pack([part.contiguous().view(torch.uint8) for part in packed], parts),) if packed else ()
        return (*message, *_others(tensors))

    def _opened(self, pending: Pending, like: Sequence[Tensor], parts: int = 1, times: int = 1) -> Pending:
        """The tensors of such a message, each ``times`` as long as in ``like``."""
        shapes = [(t.dtype, [_Part((times * p.shape[0], *p.shape[1:]), p.dtype) for p in self._parts(t)]) for t in like]

        def finish() -> Tensors:
            arrived = list(pending.wait())
            inside = [part for dtype, of_tensor in shapes if dtype in TWO_BYTES for part in of_tensor]
            unpacked: list[Tensor] = []
            if inside:
                unpacked += unpack(arrived.pop(0), [p.shape for p in inside], [p.dtype for p in inside], parts)
            return tuple(
                fused.unpack(unpacked.pop(0), unpacked.pop(0), self._block, dtype)
                if dtype in TWO_BYTES
                else arrived.pop(0)
                for dtype, _ in shapes
            )

        return Pending(finish)

    def _nbytes(self, t: Tensor) -> int:
        """Bytes of a packed tensor."""
        return sum(prod(part.shape) for part in self._parts(t))

    def _parts(self, t: Tensor) -> tuple[_Part, _Part]:
        blocks = -(-t.size(0) // self._block)
        return _Part(tuple(t.shape), torch.float8_e4m3fn), _Part((blocks, *t.shape[1:3]), torch.uint8)


class _Part(NamedTuple):
    """The elements or the exponents of a packed tensor, a byte each."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _packed(t: Tensor) -> bool:
    return t.dtype in TWO_BYTES


def _others(tensors: Sequence[Tensor]) -> Tensors:
    return tuple(t for t in tensors if not _packed(t))
