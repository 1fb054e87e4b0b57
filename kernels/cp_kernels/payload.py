"""FP8 payloads: e4m3 elements with a power-of-two scale per (block of tokens, batch, head).

    x [s, b, h, d]  ->  payload [s, b, h, d] in float8_e4m3fn, exponents [ceil(s / block), b, h] in uint8

The scale of a block is 2^(exponent - 127), the smallest that maps its largest finite number to at most 448, but at
least 2^-126. ``cp_plugin/core/payload.py`` explains the format and has the bit-identical torch version.

bfloat16 is read and written as the upper half of a float32: exact, and the same in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.codes import converts, decode, encode
from cp_kernels.offsets import check_dense, index_type, reach
from cp_kernels.rows import bits, read

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ELEMENTS = 16384
"""Of a block held in registers at a time: 64 numbers for each of 256 threads."""


def pack(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Payload and exponents of ``x [s, b, h, d]`` (dense last dimension; bfloat16, float16 or float32).

    Raises:
        ValueError: for another dtype or shape, or block < 1.
    """
    _check(x, block)
    s, b, h, d = x.shape
    payload = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    exponents = torch.empty((triton.cdiv(s, block), b, h), dtype=torch.uint8, device=x.device)
    if x.numel():
        _pack_kernel[(exponents.numel(),)](
            bits(x), payload.view(torch.uint8), exponents, s, b, h, x.stride(0), x.stride(1), x.stride(2),
            HARDWARE=converts(x), INDEX=index_type(max(reach(x.shape, x.stride()), x.numel())), **_blocks(block, d),
        )  # fmt: skip
    return payload, exponents


def unpack(payload: Tensor, exponents: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack``, contiguous, saturating at the dtype's largest number.

    Raises:
        ValueError: for another dtype than ``pack`` takes, or exponents that do not match the payload.
    """
    _check_packed(payload, exponents, block, dtype)
    s, b, h, d = payload.shape
    x = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    exponents = exponents.contiguous()
    if x.numel():
        _unpack_kernel[(exponents.numel(),)](
            payload.view(torch.uint8), exponents, bits(x), s, b, h, payload.stride(0), payload.stride(1),
            payload.stride(2),
            LARGEST=torch.finfo(dtype).max, HARDWARE=converts(x),
            INDEX=index_type(max(reach(payload.shape, payload.stride()), x.numel())), **_blocks(block, d),
        )  # fmt: skip
    return x


def _check(x: Tensor, block: int) -> None:
    if x.dim() != 4 or x.dtype not in DTYPES:
        raise ValueError(f"payloads are packed from [s, b, h, d] in {DTYPES}, got {tuple(x.shape)} in {x.dtype}")
    if block < 1:
        raise ValueError(f"a block is at least one token, got {block}")
    check_dense(x=x)


def _check_packed(payload: Tensor, exponents: Tensor, block: int, dtype: torch.dtype) -> None:
    if payload.dim() != 4 or payload.element_size() != 1 or block < 1 or dtype not in DTYPES:
        raise ValueError(
            f"payloads are [s, b, h, d] of bytes in blocks of tokens, and are unpacked to {DTYPES}: got "
            f"{tuple(payload.shape)} in {payload.dtype}, blocks of {block}, {dtype}"
        )
    want = (triton.cdiv(payload.size(0), block), *payload.shape[1:3])
    if exponents.shape != want or exponents.dtype != torch.uint8:
        raise ValueError(f"exponents must be uint8 {want}, got {exponents.dtype} {tuple(exponents.shape)}")
    check_dense(payload=payload)


def _blocks(block: int, d: int) -> dict[str, int]:
    width = triton.next_power_of_2(d)
    rows = max(1, min(triton.next_power_of_2(block), ELEMENTS // width))
    return {"BLOCK": block, "D": d, "ROWS": rows, "WIDTH": width, "num_warps": 8 if rows * width > 4096 else 4}


@triton.jit
def _pack_kernel(
    x, payload, exponents, s, b, h, s_apart, b_apart, h_apart,
    BLOCK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """One exponent and its block, read once if it fits into ROWS."""
    program = tl.program_id(0).to(INDEX)
    first = program // (b * h) * BLOCK
    b_i = program // h % b
    h_i = program % h
    column = tl.arange(0, WIDTH)[None, :]
    of_head = x + b_i * b_apart + h_i * h_apart

    largest = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, BLOCK, ROWS):
        token, inside = _tokens(first, start, s, BLOCK, ROWS)
        here = inside[:, None] & (column < D)
        size = tl.abs(read(of_head + token[:, None] * s_apart + column, here, tl.float32))
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
    top = tl.max(tl.max(largest, 1), 0).to(tl.int32, bitcast=True)
    exponent = tl.maximum((top >> 23) - 8 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32), 1)

    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for start in range(0, BLOCK, ROWS):
        token, inside = _tokens(first, start, s, BLOCK, ROWS)
        here = inside[:, None] & (column < D)
        number = read(of_head + token[:, None] * s_apart + column, here, tl.float32)
        code = tl.where(tl.abs(number) < float("inf"), encode(number * down, 3, HARDWARE), 0x7F)
        row = (token * b + b_i) * h + h_i
        tl.store(payload + row[:, None] * D + column, code.to(tl.uint8), mask=here)
    tl.store(exponents + program, exponent.to(tl.uint8))


@triton.jit
def _unpack_kernel(
    payload, exponents, x, s, b, h, s_apart, b_apart, h_apart,
    BLOCK: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, LARGEST: tl.constexpr,
    HARDWARE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """The block of one exponent."""
    program = tl.program_id(0).to(INDEX)
    first = program // (b * h) * BLOCK
    b_i = program // h % b
    h_i = program % h
    column = tl.arange(0, WIDTH)[None, :]
    of_head = payload + b_i * b_apart + h_i * h_apart
    up = (tl.load(exponents + program).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    for start in range(0, BLOCK, ROWS):
        token, inside = _tokens(first, start, s, BLOCK, ROWS)
        here = inside[:, None] & (column < D)
        number = decode(tl.load(of_head + token[:, None] * s_apart + column, mask=here, other=0), 3, HARDWARE) * up
        number = tl.where(number > LARGEST, LARGEST, tl.where(number < -LARGEST, -LARGEST, number))
        row = (token * b + b_i) * h + h_i
        _write(x + row[:, None] * D + column, number, here)


@triton.jit
def _tokens(first, start, s, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """ROWS tokens of a block from ``start`` on, and their validity."""
    row = start + tl.arange(0, ROWS)
    token = first + row
    return token, (row < BLOCK) & (token < s)


@triton.jit
def _write(at, number, inside):
    """Store numbers that are exact in the dtype; bfloat16 is written as int16."""
    if at.dtype.element_ty == tl.int16:
        tl.store(at, (number.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(at, number.to(at.dtype.element_ty), mask=inside)
