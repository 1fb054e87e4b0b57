"""float8 measuring and rounding, interpreted, bit for bit against plain torch. Sizes and strides: ``test_fused``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from cp_kernels import codes
from cp_kernels import float8 as kernel
from torch import Tensor

from cp_plugin.engine.core import scaling
from cp_plugin.engine.core.scaling import E4M3, E5M2, Extent
from cp_plugin.engine.kernels import fused

inf, nan = torch.inf, torch.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def every(dtype: torch.dtype) -> Tensor:
    """All finite float8 numbers, the midpoints, and their float32 neighbours."""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()]
    middles = ((numbers[1:] + numbers[:-1]) / 2).float()
    up, down = middles.nextafter(torch.tensor(inf)), middles.nextafter(torch.tensor(0.0))
    x = torch.cat([numbers.float(), middles, up, down, torch.tensor([1e-30, 1e-45, 1e30, 3e38])])
    return torch.cat([x, -x]).view(1, 1, 1, -1)


def check(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    got, want = kernel.quantize(x, scale, dtype), fused.quantize(x, scale, dtype)
    assert got.dtype == dtype and got.is_contiguous()
    lost = want.float().isnan()
    assert torch.equal(got.float().isnan(), lost)
    assert torch.equal(got.view(torch.uint8)[~lost], want.view(torch.uint8)[~lost])
    got, want = kernel.rounded(x, scale, dtype), fused.rounded(x, scale, dtype)
    assert got.dtype == x.dtype and got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


@TYPES
def test_every_number_and_every_tie(dtype: torch.dtype) -> None:
    for scale in (1.0, 2.0**-3, nan):
        check(every(dtype), torch.tensor(scale), dtype)


@pytest.mark.parametrize("bad", [nan, -nan, inf, -inf])
def test_extents_of_nonfinite_values(bad: float) -> None:
    x = torch.linspace(-9, 7, 96).view(3, 1, 2, 16)
    x[2, 0, 1, 3] = bad
    got, want = Extent(*kernel.extents((x,))[0]), scaling.extent(x)
    torch.testing.assert_close(got, want, rtol=0.0, atol=0.0, equal_nan=True)


def test_no_tokens() -> None:
    assert torch.equal(kernel.extents((torch.zeros(0, 2, 3, 4),)), torch.zeros(1, 2))


def test_invalid_arguments_are_refused() -> None:
    x, one = torch.zeros(4, 1, 2, 8), torch.ones(())
    for call, words in (
        (lambda: kernel.quantize(x.double(), one, E4M3), "torch.float64"),
        (lambda: kernel.quantize(x[0], one, E4M3), r"\(1, 2, 8\)"),
        (lambda: kernel.quantize(x, one, torch.float16), "not to torch.float16"),
        (lambda: kernel.quantize(x, one.double(), E4M3), "one float32 number"),
        (lambda: kernel.rounded(x, torch.ones(2), E4M3), "one float32 number"),
        (lambda: kernel.extents((x, x.int())), "torch.int32"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_devices_with_instructions_for_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not codes.converts(torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert not codes.converts(SimpleNamespace(is_cuda=True, device="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert codes.converts(SimpleNamespace(is_cuda=True, device="cuda"))
