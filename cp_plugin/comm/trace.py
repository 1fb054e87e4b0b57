"""TraceMesh: one rank of a mesh without peers or data.

The verbs return zeros of the right shape, best on the ``meta`` device, and fill the ledger. Running a method on it
prices the method itself, not a model of it; on a real device it measures the computation alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from cp_plugin.comm.mesh import Mesh, Pending, Tensors


class TraceMesh(Mesh):
    """A mesh that shows what a method would send, on any number of ranks."""

    def _exchange(self, axis: str, tensors: Tensors, to: int | None, source: int | None) -> Pending:
        if source is None:
            return Pending.done(())
        return Pending(lambda: tuple(t.new_zeros(t.shape) for t in tensors))

    def _all_gather(self, axis: str, tensors: Tensors) -> Pending:
        n = self.axes[axis]
        return Pending(lambda: tuple(t.new_zeros((n * t.size(0), *t.shape[1:])) for t in tensors))

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        n = self.axes[axis]
        return Pending(lambda: tuple(t.new_zeros((t.size(0) // n, *t.shape[1:])) for t in tensors))

    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending:
        return Pending(lambda: tuple(t.new_zeros(t.shape) for t in tensors))

    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending:
        return Pending(lambda: tuple(t.new_zeros((sum(received), *t.shape[1:])) for t in tensors))
