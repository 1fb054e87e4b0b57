"""Several tensors in one message.

Gloo runs every collective separately: without packing, a few bytes of log-sum-exp would cost a message of their own.
NCCL does not need it; it can launch several collectives as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def pack(tensors: Sequence[Tensor], parts: int = 1) -> Tensor:
    """Contiguous tensors ``[parts * s_i, ...]`` as bytes ``[parts, n]``: each part has its share of every tensor."""
    return torch.cat([as_bytes(t).view(parts, -1) for t in tensors], 1)


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes ``[n]``.

    ``t.view(torch.uint8)`` alone refuses some: a contiguous tensor may have any stride where its size is 1.
    """
    assert t.is_contiguous()
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8)


def unpack(
    message: Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], parts: int
) -> tuple[Tensor, ...]:
    """The tensors ``[parts * s_i, ...]`` of a message ``[parts, n]``."""
    found, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        end = start + prod(shape) * dtype.itemsize // parts
        found.append(message[:, start:end].clone(memory_format=torch.contiguous_format).view(dtype).view(shape))
        start = end
    return tuple(found)
