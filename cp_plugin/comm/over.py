"""Base of meshes on another mesh: verbs may change what travels; posting, names and the ledger are those below."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cp_plugin.comm.mesh import Mesh, Pending, Tensors


class Over(Mesh):
    """What is posted goes to the mesh below, which shares its ledger."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.axes, mesh.index, mesh.ledger)
        self._mesh = mesh

    def _named(
        self, verb: str, axis: str, ends: tuple[int | None, ...], post: Callable[..., Pending], tensors: Tensors
    ) -> Pending:
        return self._mesh._named(verb, axis, ends, post, tensors)

    def _along(self, axis: str, group: str) -> str:
        return self._mesh._along(axis, group)

    def _exchange(self, axis: str, tensors: Tensors, to: int | None, source: int | None) -> Pending:
        return self._mesh._exchange(axis, tensors, to, source)

    def _all_gather(self, axis: str, tensors: Tensors) -> Pending:
        return self._mesh._all_gather(axis, tensors)

    def _reduce_scatter(self, axis: str, tensors: Tensors) -> Pending:
        return self._mesh._reduce_scatter(axis, tensors)

    def _all_to_all(self, axis: str, tensors: Tensors) -> Pending:
        return self._mesh._all_to_all(axis, tensors)

    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending:
        return self._mesh._all_to_all_v(axis, tensors, sent, received)
