"""Block sizes of the attention kernels: tokens per block, warps, pipeline stages.

Hopper's matrix products (wgmma) are of four warps and 64 rows: with eight warps and fewer than 128 rows, held queries
or keys, both groups of warps compute the same scores. Instructions of fewer than 32 columns wait for shared memory.
``ci/perf/sass.json`` has what each size is compiled to.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch


class Sizes(NamedTuple):
    """Launch configuration."""

    queries: int
    keys: int
    warps: int
    stages: int


class Gpu(Enum):
    """What sizes depend on: matrix products, and shared memory per program."""

    AMPERE = "163 KiB: A100"
    SMALL = "99 KiB: 8.6, Ada, Blackwell without tensor memory"
    HOPPER = "wgmma, 227 KiB"
    BLACKWELL = "tcgen05, of at least 64 rows, 227 KiB"


def gpu(device: torch.device) -> Gpu:
    """Read a device's sizes; for the interpreter's, those of an A100."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    by_generation = {9: Gpu.HOPPER, 10: Gpu.BLACKWELL, 11: Gpu.BLACKWELL}
    return Gpu.AMPERE if capability in ((8, 0), (8, 7)) else by_generation.get(capability[0], Gpu.SMALL)


def _float32_sizes(size: int, on: Gpu) -> Sizes:
    tokens = 16 if size > 128 and on is Gpu.SMALL else 32
    return Sizes(tokens, tokens, 4, 1)


def forward_sizes(d: int, e: int, dtype: torch.dtype, on: Gpu) -> Sizes:
    """Choose sizes for heads of d elements in q and k, and e in v."""
    size = max(d, e)
    if dtype == torch.float32:
        return _float32_sizes(size, on)
    if size <= 64:
        return Sizes(128, 128, 8, 3)
    if size <= 128:
        return Sizes(128, 64, 8, 3)
    if on is Gpu.HOPPER or (size <= 192 and on is not Gpu.SMALL):
        return Sizes(128, 64, 8, 2)
    return Sizes(64, 32 if size > 192 and on is Gpu.SMALL else 64, 8, 2)


def decode_sizes(rows: int, d: int, e: int, dtype: torch.dtype) -> Sizes:
    """``rows`` share keys: the query heads of a group, times tokens."""
    size = max(d, e)
    of_rows = max(16, min(16 if dtype == torch.float32 else 64, 1 << (rows - 1).bit_length()))
    if dtype == torch.float32:
        return Sizes(of_rows, 32 if size <= 128 else 16, 4, 1)
    if size <= 128:
        return Sizes(of_rows, 64, 4, 3)
    return Sizes(of_rows, 32, 4, 3) if size <= 256 else Sizes(of_rows, 32, 8, 2)


def dq_sizes(d: int, e: int, dtype: torch.dtype, on: Gpu) -> Sizes:
    """Choose sizes for dq: a program holds queries and iterates over keys."""
    size = max(d, e)
    if dtype == torch.float32:
        return _float32_sizes(size, on)
    if size <= 128:
        return Sizes(128, 64, 8, 2)
    if on is Gpu.HOPPER:
        return Sizes(128, 64 if size <= 192 else 32, 8, 2)
    queries = 128 if size <= 192 else 64
    return Sizes(queries // 2 if on is Gpu.SMALL else queries, 32, 8, 2)


def dkv_sizes(d: int, e: int, dtype: torch.dtype, on: Gpu) -> Sizes:
    """Choose sizes for dk and dv: a program holds keys and iterates over queries."""
    size = max(d, e)
    if dtype == torch.float32:
        return _float32_sizes(size, on)
    if size <= 64 or (size <= 128 and on is Gpu.HOPPER):
        return Sizes(64, 128, 8, 2)
    if size <= 128:
        return Sizes(64, 64, 8, 2)
    if size <= 192:
        keys = {Gpu.HOPPER: 128, Gpu.BLACKWELL: 64}.get(on, 32)  # with 64 ptxas spills 10 KB on 8.0
        return Sizes(32, keys, 8, 2)
    return Sizes(32, 32 if on is Gpu.SMALL else 64, 8, 2)


def precision(x: torch.Tensor) -> str:
    """Name matrix products' precision: float32 without TF32; "widened": the interpreter only multiplies float32."""
    if x.device.type == "cpu":
        return "widened"
    return "ieee" if x.dtype == torch.float32 else "tf32"
