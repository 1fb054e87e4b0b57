"""Block sizes of the attention kernels: tokens per block, warps, pipeline stages."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Sizes(NamedTuple):
    """Launch configuration."""

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
    """``rows`` share keys: the query heads of a group, times tokens."""
    size = max(d, e)
    of_rows = max(16, min(16 if dtype == torch.float32 else 64, 1 << (rows - 1).bit_length()))
    if dtype == torch.float32:
        return Sizes(of_rows, 32 if size <= 128 else 16, 4, 1)
    if size <= 128:
        return Sizes(of_rows, 64, 4, 3)
    return Sizes(of_rows, 32, 4, 3) if size <= 256 else Sizes(of_rows, 32, 8, 2)


def dq_sizes(d: int, e: int, dtype: torch.dtype) -> Sizes:
    """For dq: a program holds queries and iterates over keys."""
    size = max(d, e)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1)
    if size <= 128:
        return Sizes(128, 64, 8, 2)
    return Sizes(128, 32, 8, 2) if size <= 192 else Sizes(64, 32, 8, 2)


def dkv_sizes(d: int, e: int, dtype: torch.dtype) -> Sizes:
    """For dk and dv: a program holds keys and iterates over queries."""
    size = max(d, e)
    if dtype == torch.float32:
        return Sizes(32, 32, 4, 1)
    if size <= 64:
        return Sizes(64, 128, 8, 2)
    return Sizes(64, 64, 8, 2) if size <= 128 else Sizes(32, 64, 8, 2)


def precision(x: torch.Tensor) -> str:
    """Of matrix products: float32 does not use TF32; "widened" for the interpreter, which only multiplies float32."""
    if x.device.type == "cpu":
        return "widened"
    return "ieee" if x.dtype == torch.float32 else "tf32"
