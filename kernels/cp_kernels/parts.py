"""Device functions shared by the attention kernels: visible stretches of tokens, loading and storing rows.

Head sizes need not be powers of two: a row is loaded as one or two power-of-two parts (192 as 128 and 64), zero-padded.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_SMALLEST = 16
"""Minimum dimension of a matrix product."""


class Parts(NamedTuple):
    """Sizes of the two parts of a row; the second may be 0."""

    first: int
    second: int

    @classmethod
    def split(cls, size: int) -> Parts:
        whole = max(_SMALLEST, 1 << (size.bit_length() - 1))
        rest = max(0, size - whole)
        return cls(whole, max(_SMALLEST, triton.next_power_of_2(rest)) if rest else 0)


@triton.jit
def held(blocks, first, last, BLOCK: tl.constexpr):
    """This program's block (``visible.Side``): tokens, validity, the interval that each sees, then the interval that
    any of them sees and the one that all see.
    """
    block = tl.program_id(0)
    there = tl.arange(0, BLOCK) < tl.load(blocks + 2 * block + 1)
    tokens = tl.load(blocks + 2 * block) + tl.arange(0, BLOCK)
    first = tl.load(first + tokens, mask=there, other=2147483647)
    last = tl.load(last + tokens, mask=there, other=-1)
    inner_low = tl.max(tl.where(there, first, 0), 0)
    inner_high = tl.min(tl.where(there, last, 2147483647), 0)
    return tokens, there, first, last, tl.min(first, 0), tl.max(last, 0), inner_low, inner_high


@triton.jit
def passed(runs, run, low, high, inner_low, inner_high, BLOCK: tl.constexpr):
    """A run to iterate over (``visible.table``): first index, its position, step, then the stretch ``begin .. end - 1``
    to visit; blocks from ``inner`` to ``edge`` are seen by all.
    """
    offset, tokens = tl.load(runs + 4 * run).to(tl.int64), tl.load(runs + 4 * run + 1)
    position, step = tl.load(runs + 4 * run + 2), tl.load(runs + 4 * run + 3)
    begin, end = stretch(low, high, position, step, tokens)
    inner_begin, inner_end = stretch(inner_low, inner_high, position, step, tokens)
    inner = begin + tl.cdiv(tl.maximum(inner_begin - begin, 0), BLOCK) * BLOCK
    edge = inner + tl.maximum(tl.minimum(inner_end, end) - inner, 0) // BLOCK * BLOCK
    return offset, position, step, begin, end, inner, edge


@triton.jit
def index_ends(number, begin, inner, edge):
    """The ``number``-th index of ``begin .. inner`` followed by ``edge ..``: the partially visible ends."""
    before = inner - begin
    return tl.where(number < before, begin + number, edge + number - before)


@triton.jit
def stretch(low, high, position, step, tokens):
    """``begin, end``: indices of a run with positions in ``low .. high``; begin >= end if there are none."""
    begin = tl.where(low > position, (low - position - 1) // step + 1, 0)
    end = tl.where(high < position, 0, tl.minimum((high - position) // step, tokens - 1) + 1)
    return begin, end


@triton.jit
def load_rows(base, rows, stride, there, FROM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Columns ``FROM .. FROM + WIDTH - 1`` of rows of ``SIZE`` columns; 0 outside."""
    columns = FROM + tl.arange(0, WIDTH)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if FROM + WIDTH > SIZE:
        return tl.load(pointers, mask=there[:, None] & (columns < SIZE)[None, :], other=0.0)
    return tl.load(pointers, mask=there[:, None], other=0.0)


@triton.jit
def store_rows(base, rows, stride, there, x, FROM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Store to the locations of ``load_rows``, in their dtype."""
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
def capped(s, scale, CAP: tl.constexpr):
    """Products of queries and keys as scores to base 2, and the tangents of capped ones; CAP 0: no cap."""
    if CAP == 0:
        return s * (scale * LOG2_E), s
    tangent = 2 * tl.sigmoid(s * (2 * scale / CAP)) - 1
    return tangent * (CAP * LOG2_E), tangent


@triton.jit
def seen_pairs(first, last, position, step, indices, end):
    """``[tokens, indices]``: whether a token sees the tokens of a run at these indices (below ``end``)."""
    at = position + step * indices
    inside = (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
    return inside & (indices < end)[None, :]
