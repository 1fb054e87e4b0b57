"""A few numbers, objects or sentences of every rank, beside what a method sends."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from cp_plugin.engine.comm.mesh import Mesh


def gather_objects[T](x: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's object, in rank order. Collective over the group; None: over all ranks."""
    everyone = [x] * dist.get_world_size(group)
    dist.all_gather_object(everyone, x, group=group)
    return everyone


def gather_hosts(group: dist.ProcessGroup | None = None) -> tuple[str, ...]:
    """Return every rank's host, in rank order. Collective over the group; None: over all ranks."""
    return tuple(gather_objects(socket.gethostname(), group))


def gather_texts(text: str, group: dist.ProcessGroup) -> list[str]:
    """Return every rank's text, in rank order. Collective over the group, by its store, which needs no device."""
    store = distributed_c10d._get_process_group_store(group)
    number = store.add(f"cp_plugin/{group.rank()}", 1)
    store.set(f"cp_plugin/{group.rank()}/{number}", text)
    return [x.decode() for x in store.multi_get([f"cp_plugin/{rank}/{number}" for rank in range(group.size())])]


def gather_ranks(mesh: Mesh, x: Tensor) -> Tensor:
    """Every rank's tensor, in rank order, the same to the bit on each rank: ``[size, *x.shape]``. Collective.

    Tensors go around each axis: neighbours are connected already, where NCCL would allocate buffers for a collective
    that many groups never need.
    """
    stacked = x[None]
    for axis in reversed(mesh.axes):  # fastest axis first: the order of the flat index
        size, own = mesh.axes[axis], mesh.coordinates[axis]
        parts = {own: stacked}
        for step in range(1, size):
            (stacked,) = mesh.shift(axis, (stacked,)).wait()
            parts[(own - step) % size] = stacked
        stacked = torch.cat([parts[place] for place in range(size)])
    return stacked
