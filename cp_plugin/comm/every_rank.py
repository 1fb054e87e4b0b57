"""A few numbers of every rank, beside what a method sends."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_plugin.comm.mesh import Mesh


def of_every_rank(mesh: Mesh, x: Tensor) -> Tensor:
    """Every rank's tensor, in rank order, the same to the bit on each rank: ``[size, *x.shape]``. Collective.

    Tensors go around each axis: neighbours are connected already, where NCCL would allocate buffers for a collective
    that many groups never need.
    """
    found = x[None]
    for axis in reversed(mesh.axes):  # fastest axis first: the order of the flat index
        size, here = mesh.axes[axis], mesh.coordinates[axis]
        parts = {here: found}
        for step in range(1, size):
            (found,) = mesh.shift(axis, (found,)).wait()
            parts[(here - step) % size] = found
        found = torch.cat([parts[place] for place in range(size)])
    return found
