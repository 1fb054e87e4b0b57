"""Block sizes of the attention kernels: tokens per block, warps, and blocks under way from memory."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sizes(NamedTuple):
    """Of one launch."""

    queries: int
    keys: int
    warps: int
    stages: int


def forward_sizes(d: int, e: int, dtype: torch.dtype) -> Sizes:
    """For heads of d elements in q and k, and e in v."""
    size = max(d, e)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1)
    if size <= 64:
        return Sizes(128, 128, 8, 3)
    if size <= 128:
        return Sizes(128, 64, 8, 3)
    return Sizes(128, 64, 8, 2) if size <= 192 else Sizes(64, 64, 8, 2)


def decode_sizes(rows: int, d: int, e: int, dtype: torch.dtype) -> Sizes:
    """For so many rows that share keys: the query heads of a group, of a few tokens."""
    size = max(d, e)
    of_rows = max(16, min(16 if dtype == torch.float32 else 64, 1 << (rows - 1).bit_length()))
    if dtype == torch.float32:
        return Sizes(of_rows, 32 if size <= 128 else 16, 4, 1)
    if size <= 128:
        return Sizes(of_rows, 64, 4, 3)
    return Sizes(of_rows, 32, 4, 3) if size <= 256 else Sizes(of_rows, 32, 8, 2)


def dq_sizes(d: int, e: int, dtype: torch.dtype) -> Sizes:
    """For the gradient of the queries: a program keeps queries, and passes by keys."""
    size = max(d, e)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1)
    if size <= 128:
        return Sizes(128, 64, 8, 2)
    return Sizes(128, 32, 8, 2) if size <= 192 else Sizes(64, 32, 8, 2)


def dkv_sizes(d: int, e: int, dtype: torch.dtype) -> Sizes:
    """For the gradients of keys and values: a program keeps keys, and passes by queries."""
    size = max(d, e)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1)
    if size <= 64:
        return Sizes(64, 128, 8, 2)
    return Sizes(64, 64, 8, 2) if size <= 128 else Sizes(32, 64, 8, 2)


def precision(x: torch.Tensor) -> str:
    """Of matrix products: float32 is not cut to TF32. "widened": Triton's interpreter multiplies float32 only."""
    if x.device.type == "cpu":
        return "widened"
    return "ieee" if x.dtype == torch.float32 else "tf32"
