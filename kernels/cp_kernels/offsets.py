"""Offset types and stride checks: long sequences need 64-bit offsets."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

INT32_END = 2**31 - 2**20
"""Larger offsets use 64 bits: a block starts below 2^31 and may reach 2^20 further."""


def reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """The largest offset, in elements, from the first element."""
    return sum((size - 1) * abs(step) for size, step in zip(shape, stride, strict=True))


def index_type(largest: int) -> tl.dtype:
    """The integer type for offsets up to ``largest``."""
    return tl.int32 if largest < INT32_END else tl.int64


def check_dense(**tensors: Tensor) -> None:
    """ValueError for tensors without a dense last dimension."""
    for name, t in tensors.items():
        if t.size(-1) > 1 and t.stride(-1) != 1:
            raise ValueError(f"{name} must have a dense last dimension, got strides {t.stride()} of {tuple(t.shape)}")


def check_rows_apart(**tensors: Tensor) -> None:
    """ValueError for tensors whose rows share memory and so cannot be updated in place."""
    for name, t in tensors.items():
        if any(size > 1 and step == 0 for size, step in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(f"rows of {name} {tuple(t.shape)} share memory: its strides are {t.stride()}")


def check_like(name: str, x: Tensor, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """ValueError for a tensor of another shape, dtype or device than that of ``like``."""
    if x.shape != shape or x.dtype != dtype or x.device != like.device:
        raise ValueError(
            f"{name} must be {dtype} {tuple(shape)} on {like.device}, got {x.dtype} {tuple(x.shape)} on {x.device}"
        )


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of its numbers are kept."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's accumulation type."""
    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]
