"""Which integers reach every element of a tensor: with long sequences, 32 bits do not."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

INT32_END = 2**31 - 2**20
"""Offsets from here on get 64 bits: a block of a kernel begins at less than 2^31 and may reach 2^20 further."""


def reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The largest offset, in elements, between the first element and any other."""
    return sum((size - 1) * abs(step) for size, step in zip(shape, stride, strict=True))


def index_type(largest: int) -> tl.dtype:
    """The integer type in which a kernel must compute offsets up to this one."""
    return tl.int32 if largest < INT32_END else tl.int64


def check_dense(**tensors: Tensor) -> None:
    """ValueError for tensors whose last dimension is not dense."""
    for name, t in tensors.items():
        if t.size(-1) > 1 and t.stride(-1) != 1:
            raise ValueError(f"{name} must have a dense last dimension, got strides {t.stride()} of {tuple(t.shape)}")


def check_rows_apart(**tensors: Tensor) -> None:
    """ValueError for tensors to be updated in place whose rows share memory: programs would overwrite each other's."""
    for name, t in tensors.items():
        if any(size > 1 and step == 0 for size, step in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(f"rows of {name} {tuple(t.shape)} share memory: its strides are {t.stride()}")


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name for a floating-point type in which sums are kept."""
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]
