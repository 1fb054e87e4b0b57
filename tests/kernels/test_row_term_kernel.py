"""The stand-in for out, interpreted, against plain torch and float64. Any size, dtype and strides: ``test_fused``."""

from __future__ import annotations

import pytest
import torch
from cp_kernels import row_term as kernel
from torch import Tensor

from cp_plugin.engine.kernels import fused

inf, nan = torch.inf, torch.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN and of 0 / 0
SHAPE = (5, 2, 3)
"""Tokens, batch, heads."""
EXACT = {torch.bfloat16: 2**-7, torch.float32: 2**-22}
"""Half a unit of the last place, and a few for sums; the interpreter cuts bfloat16 off."""


def operands(e: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    """dout and out; some rows and elements of dout are 0."""
    generator = torch.Generator().manual_seed(seed)
    dout, out = (torch.randn((*SHAPE, e), generator=generator, dtype=torch.float64) for _ in range(2))
    dout[1] = dout[3, 1, 2] = 0.0
    dout[..., :2] = 0.0
    return dout.to(dtype), out.to(dtype)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e36])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_tiny_and_huge(dtype: torch.dtype, size: float) -> None:
    dout, out = operands(32, torch.float64)
    dout = (dout / dout.abs().max() * size).to(dtype)
    delta = (dout.double() * out.double()).sum(-1).float()
    got, want = kernel.out_from_delta(dout, delta), fused.out_from_delta(dout, delta)
    assert got.dtype == want.dtype == dtype and got.is_contiguous()
    smallest = torch.finfo(dtype).smallest_normal
    torch.testing.assert_close(got, want, rtol=4 * EXACT[dtype], atol=4 * smallest, equal_nan=True)
    if size > 1e-38:
        blank = dout.float().abs().amax(-1) == 0
        again = (dout.double() * got.double()).sum(-1)
        torch.testing.assert_close(again[~blank], delta[~blank].double(), rtol=2**-6, atol=0.0)


def test_invalid_arguments_are_refused() -> None:
    dout, out = operands(8)
    delta = kernel.delta(dout, out)
    for call, words in (
        (lambda: kernel.delta(dout, out[:2]), "one shape"),
        (lambda: kernel.delta(dout[0], out[0]), "one shape"),
        (lambda: kernel.delta(dout, out.double()), "float64 with float64|float64 goes"),
        (lambda: kernel.delta(dout.int(), out.int()), "torch.int32"),
        (lambda: kernel.out_from_delta(dout, delta.double()), "torch.float64"),
        (lambda: kernel.out_from_delta(dout, delta[:2]), "delta must be"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
