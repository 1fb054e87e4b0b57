"""FP8 payloads: e4m3 elements with a power-of-two scale per (block of tokens, batch, head).

    x [s, b, h, d]  ->  payload [s, b, h, d] in float8_e4m3fn, exponents [ceil(s / block), b, h] in uint8

The scale of a block is 2^(exponent - 127), the smallest that maps its largest element to at most 448 (e4m3's maximum).
No element saturates; the error of x is at most 2^-4 |x|, or scale * 2^-10 where |x| < scale * 2^-6. Scaling by powers
of two is exact, so **repacking an unpacked payload changes nothing** and hops around a ring add no error.

Scales are at least 2^-126 (exponent 1, also for zeros), where scale * 2^-10 is below every bfloat16 or float16 number.
Values that would round beyond the dtype's maximum become that maximum. NaN and infinity become NaN and do not affect
the scale of their block.

Several tensors travel as one message, in parts of which each goes to another rank, or comes from one. Blocks end where
parts do.

Plain torch for any device; ``engine.kernels.fused`` has the bit-identical kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be packed."""


def pack(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Payload of ``x [s, b, h, d]`` and one exponent per ``block`` tokens; ValueError for another dtype or shape, or
    block < 1."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        raise ValueError(f"payloads are packed from [s, b, h, d] in {DTYPES}, got {tuple(x.shape)} in {x.dtype}")
    blocks = _blocks(x, block)
    wide = x.float()
    finite = wide.isfinite()
    sizes = torch.where(finite, wide.abs(), 0.0).amax(-1) if x.size(3) else wide.new_zeros(x.shape[:3])
    largest = pad(sizes, (0, 0, 0, 0, 0, blocks * block - x.size(0))).unflatten(0, (blocks, block)).amax(1)
    bits = largest.view(torch.int32)
    exponents = ((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)).clamp(min=1)  # 448 is 1.75 * 2^8
    down = _power_of_two(254 - exponents, block, x.size(0))
    payload = torch.where(finite, wide * down, torch.nan).to(torch.float8_e4m3fn)
    return payload, exponents.to(torch.uint8)


def unpack(payload: Tensor, exponents: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack`` in a dtype of ``DTYPES``; payloads may also be uint8. ValueError for another dtype, or
    exponents that do not match the payload."""
    if payload.dim() != 4 or payload.element_size() != 1 or dtype not in DTYPES:
        raise ValueError(
            f"payloads are [s, b, h, d] of bytes, and are unpacked to {DTYPES}: got {tuple(payload.shape)} in "
            f"{payload.dtype}, {dtype}"
        )
    want = (_blocks(payload, block), *payload.shape[1:3])
    if exponents.shape != want or exponents.dtype != torch.uint8:
        raise ValueError(f"exponents must be torch.uint8 {want}, got {exponents.dtype} {tuple(exponents.shape)}")
    up = _power_of_two(exponents.int(), block, payload.size(0))
    largest = torch.finfo(dtype).max
    return (payload.view(torch.float8_e4m3fn).float() * up).clamp(-largest, largest).to(dtype)


def pack_message(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]], block: int) -> Tensor:
    """Tensors as one message, uint8 ``[bytes]``: part after part, the payload and the exponents of each tensor.

    rows: tokens of each tensor in each part; a part's last block may be short.
    """
    parts = zip(*(x.split(list(of_parts)) for x, of_parts in zip(tensors, rows, strict=True)), strict=True)
    packed = [piece for part in parts for x in part if len(x) for piece in pack(x, block)]
    nothing = tensors[0].new_empty(0, dtype=torch.uint8)
    return torch.cat([nothing, *(piece.flatten().view(torch.uint8) for piece in packed)])


def unpack_message(
    message: Tensor,
    shapes: Sequence[tuple[int, int, int]],
    dtypes: Sequence[torch.dtype],
    rows: Sequence[Sequence[int]],
    block: int,
) -> tuple[Tensor, ...]:
    """The tensors of a message, contiguous; shapes: b, h and d of each."""
    tensors = [[message.new_empty((0, *shape), dtype=dtype)] for shape, dtype in zip(shapes, dtypes, strict=True)]
    for part in zip(*rows, strict=True):
        for n, (b, h, d), dtype, so_far in zip(part, shapes, dtypes, tensors, strict=True):
            if not n:
                continue
            blocks = -(-n // block)
            payload, exponents, message = message.split(
                (n * b * h * d, blocks * b * h, len(message) - (n * d + blocks) * b * h)
            )
            so_far.append(unpack(payload.view(n, b, h, d), exponents.view(blocks, b, h), block, dtype))
    return tuple(map(torch.cat, tensors))


def message_bytes(shapes: Sequence[tuple[int, int, int]], rows: Sequence[int], block: int) -> int:
    """Bytes of a part of ``rows`` tokens of each tensor."""
    return sum((n * d - (-n // block)) * b * h for n, (b, h, d) in zip(rows, shapes, strict=True))


def _blocks(x: Tensor, block: int) -> int:
    if block < 1:
        raise ValueError(f"a block is at least one token, got {block}")
    return -(-x.size(0) // block)


def _power_of_two(exponents: Tensor, block: int, s: int) -> Tensor:
    """2^(exponent - 127) for each of s tokens: ``[s, b, h, 1]``."""
    return (exponents << 23).view(torch.float32).repeat_interleave(block, 0)[:s].unsqueeze(-1)
