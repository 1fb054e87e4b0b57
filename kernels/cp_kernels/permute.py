"""Row permutation: a bitwise copy for any dtype.

    gather    gathered[i] = x[order[i]]            scatter    scattered[order[i]] = x[i]

Rows are copied as the widest integers that divide them. A row is dense or consists of evenly spaced dense pieces, as in
a slice of the heads of ``[s, b, h, d]``; other rows are first made contiguous by torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.offsets import index_type, reach

BLOCK_BYTES = 16384
"""Per program: 8 vector copies of 16 bytes for 32 threads of four warps."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_rows(tensors: Sequence[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    """``x[order]`` of every tensor, contiguous; ValueError for an order of another dtype, shape or device.

    Args:
        tensors: ``[s, ...]``, of any dtypes and trailing shapes.
        order: int64 or int32 ``[n]`` on their device, in 0 .. s - 1; unchecked, as that would synchronize.
    """
    return tuple(_permuted(x, order, order.numel(), scatter=False) for x in tensors)


def scatter_rows(tensors: Sequence[Tensor], order: Tensor) -> tuple[Tensor, ...]:
    """The inverse of ``gather_rows``: ``scattered[order[i]] = x[i]``, contiguous; ValueError as there.

    order: a permutation of 0 .. s - 1, int64 or int32 ``[s]`` on their device; unchecked.
    """
    for x in tensors:
        if x.size(0) != order.numel():
            raise ValueError(f"an order of {order.numel()} rows cannot scatter a tensor of {x.size(0)}")
    return tuple(_permuted(x, order, x.size(0), scatter=True) for x in tensors)


def _permuted(x: Tensor, order: Tensor, rows: int, *, scatter: bool) -> Tensor:
    if order.dim() != 1 or order.dtype not in (torch.int64, torch.int32) or order.device != x.device:
        raise ValueError(
            f"an order must be int64 or int32 [rows] on {x.device}, got {order.dtype} {tuple(order.shape)}"
        )
    out = x.new_empty((rows, *x.shape[1:]))
    if not out.numel():
        return out
    pieces = _divide_rows(x)
    word = _widest_word(pieces, out)
    source, to = pieces.view(word), out.view(rows, -1).view(word)
    width, piece = to.size(1), source.size(2)
    columns = min(triton.next_power_of_2(width), BLOCK_BYTES // word.itemsize)
    block = max(1, BLOCK_BYTES // word.itemsize // columns)
    largest = max(reach(source.shape, source.stride()), to.numel(), rows)
    _permute_kernel[(triton.cdiv(rows, block), triton.cdiv(width, columns))](
        source, order, to, rows, width, source.stride(0), source.stride(1), order.stride(0),
        PIECE=piece, WHOLE=piece == width, SCATTER=scatter, ROWS=block, COLUMNS=columns, INDEX=index_type(largest),
        num_warps=4,
    )  # fmt: skip
    return out


def _divide_rows(x: Tensor) -> Tensor:
    """A view ``[s, pieces, elements]`` with dense pieces, of a copy if there is none."""
    sizes, strides = [1], [1]  # from the last dimension to the first
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size == 1:
            continue
        if stride == sizes[-1] * strides[-1]:
            sizes[-1] *= size
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 2:
        return x.contiguous().view(x.size(0), 1, -1)
    count, apart = (sizes[1], strides[1]) if len(sizes) == 2 else (1, sizes[0])
    return x.as_strided((x.size(0), count, sizes[0]), (x.stride(0), apart, 1))


def _widest_word(pieces: Tensor, out: Tensor) -> torch.dtype:
    """The widest integer that divides pieces, their distances and both addresses."""
    size = pieces.element_size()
    lengths = [pieces.size(2) * size, *(stride * size for stride in pieces.stride()[:2])]
    for word in WORDS:
        if all(n % word.itemsize == 0 for n in (*lengths, pieces.data_ptr(), out.data_ptr())):
            return word
    raise AssertionError("every tensor is a whole number of bytes")


@triton.jit
def _permute_kernel(
    source, order, to, rows, width, row_apart, piece_apart, order_apart,
    PIECE: tl.constexpr, WHOLE: tl.constexpr, SCATTER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """Copies a block of rows and columns; a row is one piece (WHOLE) or several of PIECE words."""
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    other = tl.load(order + row * order_apart, mask=known, other=0).to(INDEX)
    column = tl.program_id(1).to(INDEX) * COLUMNS + tl.arange(0, COLUMNS)
    inside = known[:, None] & (column < width)[None, :]
    within = column if WHOLE else column // PIECE * piece_apart + column % PIECE
    read = row if SCATTER else other
    write = other if SCATTER else row
    words = tl.load(source + (read * row_apart)[:, None] + within[None, :], mask=inside)
    tl.store(to + (write * width)[:, None] + column[None, :], words, mask=inside)
