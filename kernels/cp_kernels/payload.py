"""FP8 payloads: e4m3 elements with a power-of-two scale per (block of tokens, batch, head).

    x [s, b, h, d]  ->  payload [s, b, h, d] in float8_e4m3fn, exponents [ceil(s / block), b, h] in uint8

    tensors of several parts  ->  one message in uint8: part after part, the elements and exponents of each tensor

The scale of a block is 2^(exponent - 127), the smallest that maps its largest finite number to at most 448, but at
least 2^-126. ``cp_plugin/engine/core/payload.py`` explains the format and has the bit-identical torch version.

A message is packed by one launch, and unpacked by one, for any number of tensors and parts: a table says where each
block is in its tensor, and where in the message.

bfloat16 is read and written as the upper half of a float32: exact, and the same in Triton's interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cp_kernels.codes import converts, decode, encode
from cp_kernels.offsets import check_dense, check_like, index_type, reach
from cp_kernels.rows import bits, read

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ELEMENTS = 16384
"""Of a block held in registers at a time: 64 numbers for each of 256 threads."""


def pack(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Payload and exponents of ``x [s, b, h, d]`` (dense last dimension; bfloat16, float16 or float32); ValueError for
    another dtype or shape, or block < 1."""
    message = pack_message((x,), (x.shape[:1],), block)
    elements, exponents = message.split((x.numel(), len(message) - x.numel()))
    return elements.view(torch.float8_e4m3fn).view(x.shape), exponents.view(triton.cdiv(len(x), block), *x.shape[1:3])


def unpack(payload: Tensor, exponents: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack``, contiguous, saturating at the dtype's largest number; ValueError for another dtype than
    ``pack`` takes, or exponents that do not match the payload."""
    _check_packed(payload, exponents, block, dtype)
    message = torch.cat((payload.view(torch.uint8).flatten(), exponents.flatten()))
    return unpack_message(message, (tuple(payload.shape[1:]),), (dtype,), ((len(payload),),), block)[0]


def pack_message(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], block: int) -> Tensor:
    """The message of all tensors: uint8 ``[bytes]``.

    Args:
        tensors: as for ``pack``, on one device.
        rows: tokens of each tensor in each part.

    ValueError as ``pack`` does, and for rows that do not add up to the tensors.
    """
    for x, of_parts in zip(tensors, rows, strict=True):
        _check(x, block)
        if sum(of_parts) != len(x):
            raise ValueError(f"parts of {list(of_parts)} tokens do not add up to {tuple(x.shape)}")
    device, largest = tensors[0].device, max(reach(x.shape, x.stride()) for x in tensors)
    plan = _planned(_filled(rows), tuple(tuple(x.shape[1:]) for x in tensors), block, device)
    message = torch.empty(plan.nbytes, dtype=torch.uint8, device=device)
    if plan.programs:
        _pack_message_kernel[(plan.programs, len(tensors))](
            tuple(map(bits, tensors)), message, plan.table, tuple(x.stride()[:3] for x in tensors), plan.shapes,
            plan.table.size(1), HARDWARE=converts(message), INDEX=index_type(largest), **plan.sizes,
        )  # fmt: skip
    return message


def unpack_message(
    message: Tensor,
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[torch.dtype],
    rows: Sequence[Sequence[int]],
    block: int,
) -> tuple[Tensor, ...]:
    """The tensors ``[s, b, h, d]`` of a message, contiguous, saturating at their dtype's largest number.

    Args:
        message: uint8 ``[bytes]``, contiguous.
        shapes: b, h and d of each.
        dtypes: of each.
        rows: tokens of each in each part.

    ValueError for a dtype that ``pack`` does not take, or a message of another size.
    """
    plan = _planned(_filled(rows), tuple(map(tuple, shapes)), block, message.device)
    if message.shape != (plan.nbytes,) or message.dtype != torch.uint8 or not set(dtypes) <= set(DTYPES):
        raise ValueError(
            f"a message of {[list(of_parts) for of_parts in rows]} tokens of {list(shapes)} is uint8 [{plan.nbytes}], "
            f"and is unpacked to {DTYPES}: got {message.dtype} {tuple(message.shape)}, {list(dtypes)}"
        )
    tensors = tuple(
        torch.empty((sum(of_parts), *shape), dtype=dtype, device=message.device)
        for of_parts, shape, dtype in zip(rows, shapes, dtypes, strict=True)
    )
    if plan.programs:
        _unpack_message_kernel[(plan.programs, len(tensors))](
            message, tuple(map(bits, tensors)), plan.table, plan.shapes, plan.table.size(1), HARDWARE=converts(message),
            INDEX=index_type(max(x.numel() for x in tensors)), **plan.sizes,
        )  # fmt: skip
    return tensors


class _Plan(NamedTuple):
    """Launch parameters of a message."""

    nbytes: int
    programs: int
    """Of the tensor with the most blocks and heads."""
    table: Tensor
    """int64 ``[tensors, most blocks, 4]``: first row and number of rows of each block, and the offsets of its elements
    and of its exponents in the message."""
    shapes: tuple[tuple[int, int, int, int], ...]
    """Of each tensor: its number of blocks and b, h, d."""
    sizes: dict[str, int]
    """Constants of the kernels."""


def _filled(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Without the parts that are empty: peers without rows need no table of their own."""
    some = [any(part) for part in zip(*rows, strict=True)]
    return tuple(tuple(compress(of_parts, some)) for of_parts in rows)


@lru_cache(maxsize=256)
def _planned(
    rows: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, int, int], ...], block: int, device: torch.device
) -> _Plan:
    if block < 1:
        raise ValueError(f"a block is at least one token, got {block}")
    blocks: list[list[tuple[int, int, int, int]]] = [[] for _ in shapes]
    passed, at = [0] * len(shapes), 0
    for part in zip(*rows, strict=True):
        for i, (n, (b, h, d)) in enumerate(zip(part, shapes, strict=True)):
            exponents = at + n * b * h * d
            for number, first in enumerate(range(0, n, block)):
                places = at + first * b * h * d, exponents + number * b * h
                blocks[i].append((passed[i] + first, min(block, n - first), *places))
            passed[i], at = passed[i] + n, exponents + triton.cdiv(n, block) * b * h
    most = max(map(len, blocks))
    filled = [[*each, *[(0,) * 4] * (most - len(each))] for each in blocks]
    table = torch.tensor(filled, dtype=torch.int64)
    elements = any(b * h * d for b, h, d in shapes)
    return _Plan(
        nbytes=at,
        programs=max(len(each) * b * h for each, (b, h, _) in zip(blocks, shapes, strict=True)) if elements else 0,
        table=table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device),
        shapes=tuple((len(each), *shape) for each, shape in zip(blocks, shapes, strict=True)),
        sizes={"ALIGNED": math.gcd(16, *(entry[2] for each in blocks for entry in each))}
        | _blocks(block, max(1, *(d for _, _, d in shapes))),
    )


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
    check_like("exponents", exponents, payload, want, torch.uint8)
    check_dense(payload=payload)


def _blocks(block: int, d: int) -> dict[str, int]:
    width = triton.next_power_of_2(d)
    rows = max(1, min(triton.next_power_of_2(block), ELEMENTS // width))
    return {"BLOCK": block, "ROWS": rows, "WIDTH": width, "num_warps": 8 if rows * width > 4096 else 4}


@triton.jit
def _pack_message_kernel(
    xs, message, table, strides, shapes, most,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """One exponent and its block, of the tensor of the grid's second axis."""
    for i in tl.static_range(len(xs)):
        if tl.program_id(1) == i:
            b, h, d = shapes[i][1], shapes[i][2], shapes[i][3]
            program = tl.program_id(0).to(INDEX)
            b_i, h_i = program // h % b, program % h
            if program < shapes[i][0] * b * h:
                entry = table + (i * most + program // (b * h)) * 4
                first, rows = tl.load(entry), tl.load(entry + 1).to(tl.int32)
                of_head = xs[i] + first * strides[i][0] + b_i * strides[i][1] + h_i * strides[i][2]
                to = message + tl.multiple_of(tl.load(entry + 2), ALIGNED) + (b_i * h + h_i) * d
                exponent_to = message + tl.load(entry + 3) + b_i * h + h_i
                _pack_block(
                    of_head, strides[i][0], to, b * h * d, exponent_to, rows, d, BLOCK, ROWS, WIDTH, HARDWARE, INDEX
                )


@triton.jit
def _unpack_message_kernel(
    message, xs, table, shapes, most,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """The block of one exponent, of the tensor of the grid's second axis."""
    for i in tl.static_range(len(xs)):
        if tl.program_id(1) == i:
            b, h, d = shapes[i][1], shapes[i][2], shapes[i][3]
            program = tl.program_id(0).to(INDEX)
            b_i, h_i = program // h % b, program % h
            if program < shapes[i][0] * b * h:
                entry = table + (i * most + program // (b * h)) * 4
                first, rows = tl.load(entry), tl.load(entry + 1).to(tl.int32)
                of_head = message + tl.multiple_of(tl.load(entry + 2), ALIGNED) + (b_i * h + h_i) * d
                exponent_at = message + tl.load(entry + 3) + b_i * h + h_i
                to = xs[i] + ((first * b + b_i) * h + h_i) * d
                _unpack_block(
                    of_head, b * h * d, exponent_at, to, b * h * d, rows, d, BLOCK, ROWS, WIDTH, HARDWARE, INDEX
                )


@triton.jit
def _pack_block(
    x, x_apart, to, to_apart, exponent_to, rows, d,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """``rows`` tokens of one head, BLOCK at most, read once if they fit into ROWS."""
    column = tl.arange(0, WIDTH)[None, :]
    largest = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, BLOCK, ROWS):
        row, inside = _tokens(start, rows, column < d, BLOCK, ROWS, INDEX)
        size = tl.abs(read(x + row[:, None] * x_apart + column, inside, tl.float32))
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
    top = tl.max(tl.max(largest, 1), 0).to(tl.int32, bitcast=True)
    exponent = tl.maximum((top >> 23) - 8 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32), 1)

    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    for start in range(0, BLOCK, ROWS):
        row, inside = _tokens(start, rows, column < d, BLOCK, ROWS, INDEX)
        number = read(x + row[:, None] * x_apart + column, inside, tl.float32)
        code = tl.where(tl.abs(number) < float("inf"), encode(number * down, 3, HARDWARE), 0x7F)
        tl.store(to + row[:, None] * to_apart + column, code.to(tl.uint8), mask=inside)
    tl.store(exponent_to, exponent.to(tl.uint8))


@triton.jit
def _unpack_block(
    payload, apart, exponent_at, to, to_apart, rows, d,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HARDWARE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)[None, :]
    up = (tl.load(exponent_at).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    largest = _largest(to)
    for start in range(0, BLOCK, ROWS):
        row, inside = _tokens(start, rows, column < d, BLOCK, ROWS, INDEX)
        number = decode(tl.load(payload + row[:, None] * apart + column, mask=inside, other=0), 3, HARDWARE) * up
        number = tl.where(number > largest, largest, tl.where(number < -largest, -largest, number))
        _write(to + row[:, None] * to_apart + column, number, inside)


@triton.jit
def _tokens(start, rows, inside, BLOCK: tl.constexpr, ROWS: tl.constexpr, INDEX: tl.constexpr):
    """ROWS tokens of a block from ``start`` on, and which of their numbers there are."""
    row = start + tl.arange(0, ROWS)
    return row.to(INDEX), ((row < BLOCK) & (row < rows))[:, None] & inside


@triton.jit
def _largest(at):
    """The largest number of the dtype; bfloat16 is written as int16."""
    if at.dtype.element_ty == tl.int16:
        return 3.3895313892515355e38
    elif at.dtype.element_ty == tl.float16:
        return 65504.0
    else:
        return 3.4028234663852886e38


@triton.jit
def _write(at, number, inside):
    """Store numbers that are exact in the dtype; bfloat16 is written as int16."""
    if at.dtype.element_ty == tl.int16:
        tl.store(at, (number.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(at, number.to(at.dtype.element_ty), mask=inside)
