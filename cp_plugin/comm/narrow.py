"""NarrowSums: gradient sums travel in the model's dtype instead of float32, and arrive as float32.

    exchange, all_to_all_v   of a group sums(axis): rounded before each hop
    reduce_scatter           parts are rounded once; NCCL also rounds each partial sum, Gloo and threads sum in float32

Other messages go to the mesh below, which may pack payloads; sums are never packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_plugin.comm.mesh import Mesh, Over, Pending, below, sums
from cp_plugin.core.dtypes import accumulation_dtype


class NarrowSums(Over):
    """A mesh on another one, on which sums travel in ``dtype``."""

    def __init__(self, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__(mesh)
        self._dtype = dtype

    send, receive, all_gather, all_to_all = map(below, ("send", "receive", "all_gather", "all_to_all"))

    def exchange(self, axis: str, tensors: Sequence[Tensor], *, to: int, source: int, group: str = "") -> Pending:
        if group != sums(axis):
            return self._mesh.exchange(axis, tensors, to=to, source=source, group=group)
        if self._place(axis) == to == source:
            return Pending.done(tuple(tensors))
        return self._widened(super().exchange(axis, self._narrow(tensors), to=to, source=source, group=group))

    def reduce_scatter(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        if self.axes[axis] == 1:
            return Pending.done(tuple(tensors))
        return self._widened(self._sum_and_scatter(axis, self._narrow(tensors)))

    def all_to_all_v(
        self, axis: str, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: str = ""
    ) -> Pending:
        if group != sums(axis):
            return self._mesh.all_to_all_v(axis, tensors, sent, received, group)
        return self._widened(super().all_to_all_v(axis, self._narrow(tensors), sent, received, group))

    def _narrow(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.to(self._dtype) for t in tensors]

    def _widened(self, pending: Pending) -> Pending:
        return pending.then(lambda t: t.to(accumulation_dtype(self._dtype)))
