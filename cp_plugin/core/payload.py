"""Payloads in one byte an element: e4m3, and a power of two for each (block of tokens, batch, head).

    x [s, b, h, d]  ->  payload [s, b, h, d] in float8_e4m3fn, exponents [ceil(s / block), b, h] in uint8

The scale of a block is 2^(exponent - 127), the smallest that brings its largest number to 448, e4m3's largest, or less.
So nothing has to be cut off, and a number x comes out within 2^-4 |x|, or within scale * 2^-10 where it is less than
scale * 2^-6. Powers of two scale exactly: **packing again what was unpacked changes nothing**, since every number then
is one of e4m3's times the scale, and still is if the scale has become smaller. Hops around a ring add no error.

Ends of the range: scales are at least 2^-126 (exponent 1, also of zeros), where scale * 2^-10 is less than any number
of bfloat16 or float16. What would round beyond the largest number of the dtype comes out as that largest number. NaN
and infinities come out as NaN, as e4m3 has no infinity; the other numbers of their block keep their scale.

This is plain torch, for any device; ``cp_plugin.kernels.fused`` has the kernel that computes the same, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""What can be packed."""


def pack(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """``x [s, b, h, d]`` in one of ``DTYPES`` -> its payload, and an exponent for every ``block`` tokens.

    Raises:
        ValueError: for another dtype or shape, or a block of no tokens.
    """
    if x.dim() != 4 or x.dtype not in DTYPES:
        raise ValueError(f"payloads are made of [s, b, h, d] in {DTYPES}, got {tuple(x.shape)} in {x.dtype}")
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
    """The inverse of ``pack``, in a dtype of ``DTYPES``; payloads may also be uint8.

    Raises:
        ValueError: for another dtype, or exponents that are not of such a payload.
    """
    if payload.dim() != 4 or payload.element_size() != 1 or dtype not in DTYPES:
        raise ValueError(
            f"payloads are [s, b, h, d] of bytes, and are unpacked to {DTYPES}: got {tuple(payload.shape)} in "
            f"{payload.dtype}, {dtype}"
        )
    want = (_blocks(payload, block), *payload.shape[1:3])
    if exponents.shape != want or exponents.dtype != torch.uint8:
        raise ValueError(f"exponents must be uint8 {want}, got {exponents.dtype} {tuple(exponents.shape)}")
    up = _power_of_two(exponents.int(), block, payload.size(0))
    largest = torch.finfo(dtype).max
    return (payload.view(torch.float8_e4m3fn).float() * up).clamp(-largest, largest).to(dtype)


def _blocks(x: Tensor, block: int) -> int:
    if block < 1:
        raise ValueError(f"a block is at least one token, got {block}")
    return -(-x.size(0) // block)


def _power_of_two(exponents: Tensor, block: int, s: int) -> Tensor:
    """2^(exponent - 127) for each of s tokens: ``[s, b, h, 1]``."""
    return (exponents << 23).view(torch.float32).repeat_interleave(block, 0)[:s].unsqueeze(-1)
