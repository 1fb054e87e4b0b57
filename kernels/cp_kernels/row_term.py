"""Row terms of the backward pass: delta, and an ``out'`` that stands in for ``out`` where only delta is known.

    delta            rowsum(dout * out)                      reads dout and out, writes one number per row
    out_from_delta   out' with rowsum(dout * out') = delta   reads dout, writes out'

    out' = dout / m * (delta / m / rowsum((dout / m)^2))     m: the row's largest element, 1 in rows of zeros

Each row is read once and stays in registers. Sums are in float32 (float64 for float64 tensors). Rows with NaN or
infinity in ``dout`` become NaN as a whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.offsets import accumulation_dtype, check_like, triton_type
from cp_kernels.rows import bits, block_of_rows, blocks, offsets, read

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def delta(dout: Tensor, out: Tensor) -> Tensor:
    """``rowsum(dout * out)`` of ``[s, b, h, e]`` tensors, any strides: ``[s, b, h]``, contiguous, in the accumulation
    dtype. ValueError for tensors that do not fit together, or of other dtypes."""
    _check(dout, out)
    sums = torch.empty(dout.shape[:3], dtype=accumulation_dtype(dout), device=dout.device)
    if not dout.numel():
        return sums.zero_()
    programs, rows, sizes = blocks(dout, out)
    _delta_kernel[(programs,)](
        bits(dout), bits(out), sums, dout.stride(), out.stride(), rows, *dout.shape[1:3],
        SUM=triton_type(sums.dtype), **sizes,
    )  # fmt: skip
    return sums


def out_from_delta(dout: Tensor, delta: Tensor) -> Tensor:
    """``out'`` for ``dout [s, b, h, e]`` in its dtype, contiguous; ``delta [s, b, h]`` in the accumulation dtype.
    ValueError for tensors that do not fit together, or of other dtypes."""
    _check(dout)
    check_like("delta", delta, dout, dout.shape[:3], accumulation_dtype(dout))
    out = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    if out.numel():
        programs, rows, sizes = blocks(dout, delta)
        _out_kernel[(programs,)](
            bits(dout), delta, out, dout.stride(), delta.stride(), rows, *dout.shape[1:3],
            SUM=triton_type(delta.dtype), **sizes,
        )  # fmt: skip
    return out


def _check(dout: Tensor, *others: Tensor) -> None:
    for x in (dout, *others):
        if x.dim() != 4 or x.shape != dout.shape or x.dtype not in DTYPES or x.device != dout.device:
            raise ValueError(
                f"the tensors must be [s, b, h, e] of one shape and device, in {DTYPES}: got {x.dtype} "
                f"{tuple(x.shape)} on {x.device} beside {tuple(dout.shape)} on {dout.device}"
            )
    if any(accumulation_dtype(x) != accumulation_dtype(dout) for x in others):
        raise ValueError(f"float64 goes with float64 only: got {[x.dtype for x in (dout, *others)]}")


@triton.jit
def _delta_kernel(
    dout, out, delta, dout_strides, out_strides, rows, b, h,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row, known, s_i, b_i, h_i = block_of_rows(rows, b, h, ROWS, INDEX)
    column = tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (column < D)
    of_dout = dout + offsets(s_i, b_i, h_i, dout_strides)[:, None] + column * dout_strides[3]
    of_out = out + offsets(s_i, b_i, h_i, out_strides)[:, None] + column * out_strides[3]
    product = read(of_dout, inside, SUM) * read(of_out, inside, SUM)
    tl.store(delta + row, tl.sum(product, 1), mask=known)


@triton.jit
def _out_kernel(
    dout, delta, out, dout_strides, delta_strides, rows, b, h,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    row, known, s_i, b_i, h_i = block_of_rows(rows, b, h, ROWS, INDEX)
    column = tl.arange(0, WIDTH)[None, :]
    inside = known[:, None] & (column < D)
    wide = read(dout + offsets(s_i, b_i, h_i, dout_strides)[:, None] + column * dout_strides[3], inside, SUM)
    deltas = tl.load(delta + offsets(s_i, b_i, h_i, delta_strides), mask=known, other=0.0)
    # NaN is not 0, so a row of NaN and zeros is not blank; the largest element does not show it.
    blank = tl.max((wide != 0).to(tl.int32), 1) == 0
    largest = tl.where(blank, 1.0, tl.max(tl.abs(wide), 1)).to(SUM)
    unit = _quotient(wide, largest[:, None])
    squares = tl.where(blank, 1.0, tl.sum(unit * unit, 1)).to(SUM)
    ratio = _quotient(_quotient(deltas, largest), squares)
    scaled = unit * ratio[:, None]
    tl.store(out + row[:, None] * D + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quotient(a, b):
    """Correctly rounded: the fast division of float32 is not exact."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b
