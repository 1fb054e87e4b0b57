"""Blocks of rows: shared by kernels that pass once over ``[s, b, h, d]`` tensors.

A program handles a few rows, each one ``(token, batch, head)``. bfloat16 is read as the upper half of a float32, which
is exact in Triton's interpreter too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.offsets import index_type, reach

ELEMENTS = 4096
"""Per block: 16 vector loads of 16 bytes for 32 threads of four warps in bfloat16."""


class Blocks(NamedTuple):
    """Launch parameters."""

    programs: int
    rows: int
    sizes: dict[str, object]
    """Constants of the kernel."""


def blocks(*tensors: Tensor, further: int = 0) -> Blocks:
    """Choose blocks for ``[s, b, h, d]`` tensors of one shape, and others of its first dimensions, with any strides.

    further: elements reached beyond them.
    """
    x = tensors[0]
    rows, width = x.shape[:3].numel(), triton.next_power_of_2(x.size(3))
    block = max(1, min(ELEMENTS // width, triton.next_power_of_2(rows)))
    largest = max(rows, x.numel(), *(reach(t.shape, t.stride()) for t in tensors)) + further
    sizes = {"D": x.size(3), "WIDTH": width, "ROWS": block, "INDEX": index_type(largest), "num_warps": 4}
    return Blocks(triton.cdiv(rows, block), rows, sizes)


def bits(x: Tensor) -> Tensor:
    """The form that ``read`` takes."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@triton.jit
def block_of_rows(rows, b, h, ROWS: tl.constexpr, INDEX: tl.constexpr):
    """Rows of this program in contiguous order: number, validity, token, batch, head."""
    row = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)
    return row, row < rows, row // (b * h), row // h % b, row % h


@triton.jit
def offsets(s_i, b_i, h_i, strides):
    """Row offsets in a tensor of these strides."""
    return s_i * strides[0] + b_i * strides[1] + h_i * strides[2]


@triton.jit
def read(at, inside, SUM: tl.constexpr):
    """Numbers in the accumulation dtype, 0 outside; bfloat16 is given as int16."""
    number = tl.load(at, mask=inside, other=0)
    if at.dtype.element_ty == tl.int16:
        return (number.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return number.to(SUM)
