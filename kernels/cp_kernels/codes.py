"""float8 encoding and decoding inside kernels.

A type is identified by its mantissa bits: 3 for e4m3 (``float8_e4m3fn``), 2 for e5m2. Compute capability 8.9 and newer
has instructions for them; older devices and Triton's interpreter use integer arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def converts(x: Tensor) -> bool:
    """Return True if the tensor's device has instructions for float8."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


@triton.jit
def encode(number, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """Bits, as int32, of float32 numbers within the type's range; round to nearest even."""
    if HARDWARE:
        if MANTISSA == 3:
            return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            return number.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        bias: tl.constexpr = 2 ** (6 - MANTISSA) - 1
        cut: tl.constexpr = 23 - MANTISSA
        ends_in_step: tl.constexpr = 2.0 ** (24 - bias - MANTISSA)  # of float32's steps there, the smallest of float8
        bits = number.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        small = (tl.abs(number) + ends_in_step).to(tl.int32, bitcast=True) - ((151 - bias - MANTISSA) << 23)
        large = ((size + (1 << (cut - 1)) - 1 + ((size >> cut) & 1)) >> cut) - ((127 - bias) << MANTISSA)
        normal_from: tl.constexpr = (128 - bias) << 23
        return tl.where(size < normal_from, small, large) | ((bits >> 24) & 0x80)


@triton.jit
def decode(code, MANTISSA: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 numbers from uint8 bits; infinities do not occur."""
    if HARDWARE:
        if MANTISSA == 3:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        bias: tl.constexpr = 2 ** (6 - MANTISSA) - 1
        step: tl.constexpr = 2.0 ** (1 - bias - MANTISSA)
        last: tl.constexpr = 0x7E if MANTISSA == 3 else 0x7C
        code = code.to(tl.int32)
        size = code & 0x7F
        small = (size.to(tl.float32) * step).to(tl.int32, bitcast=True)
        large = tl.where(size > last, 0x7FC00000, (size + ((127 - bias) << MANTISSA)) << (23 - MANTISSA))
        return (tl.where(size < (1 << MANTISSA), small, large) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
