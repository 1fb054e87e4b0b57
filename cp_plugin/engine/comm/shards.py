"""Verbs for shards: their tensors travel, and what arrives knows whose tokens it holds.

arriving = shift(mesh, "cp", kv)     # post
kv = arriving.wait()                 # the keys and values of the rank below
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_plugin.engine.comm.mesh import Mesh, Pending
from cp_plugin.engine.core.values import Owners, Shard


def shift[S: Shard](mesh: Mesh, axis: str, shard: S, by: int = 1) -> Pending[S]:
    """Pass a shard ``by`` places up the axis, cyclically, and receive that of the rank as far below."""
    return arriving(type(shard), mesh.shift(axis, shard.tensors, by), shifted(mesh, axis, shard.owners, by))


def all_gather[S: Shard](mesh: Mesh, axis: str, shard: S) -> Pending[S]:
    """The shards of all ranks of the axis as one, in axis order."""
    return arriving(type(shard), mesh.all_gather(axis, shard.tensors), gathered(mesh, axis, shard.owners))


def arriving[S: Shard](kind: type[S], tensors: Pending, owners: Owners) -> Pending[S]:
    """The shard made of such tensors once they arrive."""
    return Pending(lambda: kind(*tensors.wait(), owners=owners))


def gathered(mesh: Mesh, axis: str, owners: Owners) -> Owners:
    """Owners after an all-gather along the axis."""
    return lambda rank: tuple(r for peer in mesh.row(axis, rank) for r in owners(peer))


def shifted(mesh: Mesh, axis: str, owners: Owners, by: int) -> Owners:
    """Owners after ``by`` shifts up the axis."""
    if isinstance(owners, _Shifted) and owners.mesh is mesh and owners.axis == axis:
        return _Shifted(mesh, axis, owners.before, owners.by + by)
    return _Shifted(mesh, axis, owners, by)


@dataclass(frozen=True, slots=True, eq=False)
class _Shifted:
    """Owners after shifts. Consecutive shifts are merged, so a ring does not chain calls through all its hops."""

    mesh: Mesh
    axis: str
    before: Owners
    by: int

    def __call__(self, rank: int) -> tuple[int, ...]:
        return self.before(self.mesh.neighbour(self.axis, rank, -self.by))
