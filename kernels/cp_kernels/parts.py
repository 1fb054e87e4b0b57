"""What the attention kernels share: stretches of visible tokens, and loading and storing rows.

Head sizes need not be powers of two. A row is loaded as one or two parts that are, 192 as 128 and 64, and what is
missing in the second is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_SMALLEST = 16
"""What a matrix product on the device takes at least."""


class Parts(NamedTuple):
    """Sizes of the two parts of a row; the second may be 0."""

    first: int
    second: int

    @classmethod
    def of(cls, size: int) -> Parts:
        whole = max(_SMALLEST, 1 << (size.bit_length() - 1))
        rest = max(0, size - whole)
        return cls(whole, max(_SMALLEST, triton.next_power_of_2(rest)) if rest else 0)


@triton.jit
def stretch(low, high, position, step, tokens):
    """``begin, end``: the indices of a run whose positions are in ``low .. high``; begin >= end if there are none."""
    begin = tl.where(low > position, (low - position - 1) // step + 1, 0)
    end = tl.where(high < position, 0, tl.minimum((high - position) // step, tokens - 1) + 1)
    return begin, end


@triton.jit
def whole_blocks(begin, end, inner_begin, inner_end, BLOCK: tl.constexpr):
    """``first, last``: of the blocks from ``begin`` on, those between these indices lie inside the inner stretch."""
    first = begin + tl.cdiv(tl.maximum(inner_begin - begin, 0), BLOCK) * BLOCK
    last = first + tl.maximum(tl.minimum(inner_end, end) - first, 0) // BLOCK * BLOCK
    return first, last


@triton.jit
def load_rows(base, rows, stride, there, FROM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Columns ``FROM .. FROM + WIDTH - 1`` of rows of ``SIZE`` columns; 0 where there is no row or no column."""
    columns = FROM + tl.arange(0, WIDTH)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if FROM + WIDTH > SIZE:
        return tl.load(pointers, mask=there[:, None] & (columns < SIZE)[None, :], other=0.0)
    return tl.load(pointers, mask=there[:, None], other=0.0)


@triton.jit
def store_rows(base, rows, stride, there, x, FROM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Where ``load_rows`` would load from, in the dtype that is there."""
    columns = FROM + tl.arange(0, WIDTH)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tl.store(pointers, x.to(base.dtype.element_ty), mask=there[:, None] & (columns < SIZE)[None, :])


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """``a @ b + total`` in float32; see ``sizes.precision``."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def scores(a0, a1, b0, b1, PRECISION: tl.constexpr, TWO: tl.constexpr):
    """``a @ b^T`` of rows in one or two parts."""
    s = product(a0, tl.trans(b0), tl.zeros([a0.shape[0], b0.shape[0]], tl.float32), PRECISION)
    if TWO:
        s = product(a1, tl.trans(b1), s, PRECISION)
    return s


@triton.jit
def seen_pairs(first, last, position, step, indices, end):
    """``[tokens, indices]``: whether a token sees the tokens of a run at these indices, which stop before ``end``."""
    at = position + step * indices
    inside = (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
    return inside & (indices < end)[None, :]
