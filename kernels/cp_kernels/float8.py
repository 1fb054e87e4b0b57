"""Measuring tensors and rounding them to float8, in one pass over memory each.

    extents     x -> largest absolute value and largest row norm                    reads x
    quantize    x -> x * scale in e4m3 or e5m2                                      reads x, writes a byte an element
    rounded     x -> x rounded to float8 at that scale, in the dtype of x           reads x, writes as much

Round to nearest even, saturating; NaN stays NaN. Maxima are reduced as integers: the bits of non-negative floats sort
like the numbers, NaN last, so results are deterministic and NaN propagates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.codes import converts, decode, encode
from cp_kernels.rows import bits, block_of_rows, blocks, offsets, read

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def extents(tensors: Sequence[Tensor]) -> Tensor:
    """Largest absolute value and largest row norm of each tensor, float32 ``[tensors, 2]``.

    tensors: ``[s, b, h, d]`` in bfloat16, float16 or float32, any strides, on one device; ValueError for others.
    """
    maxima = torch.zeros((len(tensors), 2), dtype=torch.float32, device=tensors[0].device)
    for x, into in zip(tensors, maxima.view(torch.int32), strict=True):
        _check(x)
        if x.numel():
            programs, rows, sizes = blocks(x)
            _extents_kernel[(programs,)](bits(x), into, x.stride(), rows, *x.shape[1:3], **sizes)
    maxima[:, 1].sqrt_()
    return maxima


def quantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x * scale`` of ``[s, b, h, d]``, any strides, in float8, contiguous; the scale is a float32 scalar on its
    device. ValueError for another dtype or shape."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _round(x, scale, dtype, out.view(torch.uint8), back=False)
    return out


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``quantize(x)`` divided by the scale, in the dtype of x, contiguous; ValueError as there."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round(x, scale, dtype, out, back=True)
    return out


def _round(x: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor, *, back: bool) -> None:
    _check(x)
    if dtype not in MANTISSA:
        raise ValueError(f"the kernels round to {(*MANTISSA,)}, not to {dtype}")
    if scale.numel() != 1 or scale.dtype != torch.float32 or scale.device != x.device:
        raise ValueError(f"a scale is one float32 number on {x.device}, got {scale.dtype} {tuple(scale.shape)}")
    if x.numel():
        programs, rows, sizes = blocks(x)
        _round_kernel[(programs,)](
            bits(x), scale, out, x.stride(), rows, *x.shape[1:3],
            LARGEST=torch.finfo(dtype).max, MANTISSA=MANTISSA[dtype], BACK=back, HARDWARE=converts(x), **sizes,
        )  # fmt: skip


def _check(x: Tensor) -> None:
    if x.dim() != 4 or x.dtype not in DTYPES:
        raise ValueError(f"float8 rounding takes [s, b, h, d] in {DTYPES}, got {tuple(x.shape)} in {x.dtype}")


@triton.jit
def _extents_kernel(
    x, into, strides, rows, b, h,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    _, known, s_i, b_i, h_i = block_of_rows(rows, b, h, ROWS, INDEX)
    column = tl.arange(0, WIDTH)[None, :]
    at = x + offsets(s_i, b_i, h_i, strides)[:, None] + column * strides[3]
    number = read(at, known[:, None] & (column < D), tl.float32)
    tl.atomic_max(into, tl.max(tl.max(_size(number), 1), 0))
    tl.atomic_max(into + 1, tl.max(_size(tl.sum(number * number, 1)), 0))


@triton.jit
def _size(number):
    """The bits of the absolute value: a NaN may have a sign."""
    return number.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round_kernel(
    x, scale, out, strides, rows, b, h,
    LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BACK: tl.constexpr, HARDWARE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row, known, s_i, b_i, h_i = block_of_rows(rows, b, h, ROWS, INDEX)
    column = tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (column < D)
    by = tl.load(scale)
    number = read(x + offsets(s_i, b_i, h_i, strides)[:, None] + column * strides[3], inside, tl.float32) * by
    number = tl.where(number > LARGEST, LARGEST, tl.where(number < -LARGEST, -LARGEST, number))
    code = tl.where(number == number, encode(number, MANTISSA, HARDWARE), 0x7F).to(tl.uint8)
    there = out + row[:, None] * D + column
    if BACK:
        back = tl.div_rn(decode(code, MANTISSA, HARDWARE), by)
        tl.store(there, back.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(there, code, mask=inside)
