"""Measuring and rounding to float8: that the kernels, interpreted, make bit for bit what plain torch makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cp_kernels import codes, rows
from cp_kernels import float8 as kernel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cp_plugin.core import scaling
from cp_plugin.core.scaling import E4M3, E5M2, Extent, Scaling, scale_for
from cp_plugin.kernels import fused
from cp_plugin.kernels.backends import te_fp8

inf, nan = torch.inf, torch.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
GIVEN = pytest.mark.parametrize("given", kernel.DTYPES, ids=str)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-20, 12, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def every(dtype: torch.dtype) -> Tensor:
    """All finite float8 numbers of a type, the middles between two, and their neighbours in float32."""
    found = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    found = found[found.isfinite()]
    middles = ((found[1:] + found[:-1]) / 2).float()
    up, down = middles.nextafter(torch.tensor(inf)), middles.nextafter(torch.tensor(0.0))
    x = torch.cat([found.float(), middles, up, down, torch.tensor([1e-30, 1e-45, 1e30, 3e38])])
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
    check(every(dtype), torch.ones(()), dtype)
    check(every(dtype), torch.tensor(2.0**-3), dtype)


@GIVEN
@TYPES
def test_tensors_of_any_size(dtype: torch.dtype, given: torch.dtype) -> None:
    for shape in ((5, 2, 3, 64), (7, 1, 2, 80), (3, 1, 1, 1), (2, 1, 2, 192)):
        x = numbers(shape, given)
        check(x, scale_for(scaling.largest(x), dtype), dtype)
        check(x, torch.tensor(4.0), dtype)  # some are too large


@TYPES
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    x = numbers((3, 1, 2, 16), torch.float32)
    x[1, 0, 1, 3] = bad
    check(x, torch.tensor(0.5), dtype)
    check(x, torch.tensor(nan), dtype)


@GIVEN
def test_extents(given: torch.dtype) -> None:
    """The largest element to the bit, the longest row but for the order of its sum."""
    tensors = [numbers(shape, given, seed) for seed, shape in enumerate([(5, 2, 3, 64), (4, 1, 2, 80), (1, 1, 1, 1)])]
    found = kernel.extents(tensors)
    assert found.dtype == torch.float32 and found.shape == (3, 2)
    for (largest, longest), x in zip(found, tensors, strict=True):
        assert torch.equal(largest, scaling.largest(x))
        torch.testing.assert_close(longest, scaling.extent(x).longest, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bad", [nan, -nan, inf, -inf])
def test_extents_of_what_is_not_finite(bad: float) -> None:
    x = numbers((3, 1, 2, 16), torch.float32)
    x[2, 0, 1, 3] = bad
    found, want = Extent(*kernel.extents((x,))[0]), scaling.extent(x)
    torch.testing.assert_close(found, want, rtol=0.0, atol=0.0, equal_nan=True)


def test_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ELEMENTS", 32)
    x = numbers((6, 2, 4, 8), torch.bfloat16)
    views = x[:, :, 1:3], x[::2], x.transpose(0, 2), x[..., :5], x[:, :1, 1:2], x.transpose(2, 3), x[:1].expand(x.shape)
    for view in views:
        check(view, torch.tensor(0.25), E4M3)
        assert torch.equal(kernel.extents((view,))[0, 0], scaling.largest(view))


def test_no_tokens() -> None:
    x = torch.zeros(0, 2, 3, 4)
    assert kernel.quantize(x, torch.ones(()), E4M3).shape == x.shape
    assert torch.equal(kernel.extents((x,)), torch.zeros(1, 2))


def test_what_does_not_fit_is_refused() -> None:
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


FAULTS = {
    "the other type's mantissa": (kernel, "MANTISSA", {E4M3: 2, E5M2: 3}),
    "float16 read as bfloat16": (kernel, "bits", lambda x: x.view(torch.int16) if x.dtype == torch.float16 else x),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, scale = numbers((4, 1, 2, 16), torch.float16), torch.tensor(0.5)
    check(x, scale, E4M3)
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        check(x, scale, E4M3)


def test_devices_with_instructions_for_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not codes.converts(torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert not codes.converts(SimpleNamespace(is_cuda=True, device="cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert codes.converts(SimpleNamespace(is_cuda=True, device="cuda"))


class Bytes(TorchDispatchMode):
    """Bytes that kernels read and write; an operation of ``fused`` is one kernel, which reads its arguments once."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self._inside = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside and not func.is_view and not func.overloadpacket.__name__.startswith("empty"):
            self.total += _nbytes(args, kwargs, result)
        return result

    def one_kernel(self, name: str, operation: Any, args: tuple[Any, ...]) -> Any:
        self._inside = True
        result = operation()
        self._inside = False
        self.total += _nbytes(args, result)
        return result


def _nbytes(*given: Any) -> int:
    found = (x for x in chain.from_iterable(map(tree_leaves, given)) if isinstance(x, Tensor))
    return sum(x.numel() * x.element_size() for x in found)


@contextmanager
def counted(one_kernel: bool) -> Iterator[Bytes]:
    with Bytes() as found, fused.observed(found.one_kernel if one_kernel else None):
        yield found


LIBRARY = SimpleNamespace(
    te=SimpleNamespace(tables=SimpleNamespace(FusedAttnBackend={"FP8": 2})),
    types={E4M3: 0, E5M2: 1},
    quantizer=lambda **given: SimpleNamespace(create_tensor_from_data=lambda data, fake_dtype: data),
)


def in_many_passes(x: Tensor, times_measured: int) -> None:
    """As it was done before: every use of the largest element found it again."""
    for _ in range(times_measured):
        scale = scale_for(scaling.largest(x), E4M3)
    scaling.elements(x, scale, E4M3)


def test_bytes_of_quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v are read twice and written once, in a byte: 5 bytes an element, and a few for their scales."""
    monkeypatch.setattr(te_fp8.te, "forward_arguments", lambda *given: {})
    monkeypatch.setattr(te_fp8.te, "backward_arguments", lambda *given: {})
    q, k, v, dout, out = (numbers((64, 1, 8, 64), torch.bfloat16, seed) for seed in range(5))
    lse = torch.zeros(64, 1, 8)
    with counted(one_kernel=True) as forward:
        te_fp8.forward_arguments(LIBRARY, Scaling(), q, k, v, True, 0.1)
    with counted(one_kernel=True) as backward:
        te_fp8.backward_arguments(LIBRARY, Scaling(), dout, q, k, v, lse, out, True, 0.1)
    with counted(one_kernel=False) as before:
        for x, times in ((q, 2), (k, 2), (v, 3)):  # what was recorded, the scale, and of v the bound of out
            in_many_passes(x, times)
    rounding = 2e-2
    assert 5 <= forward.total / (3 * q.numel()) < 5 + rounding
    assert 5 <= backward.total / (5 * q.numel()) < 5 + rounding
    assert 41 <= before.total / (3 * q.numel()) < 41 + rounding


def test_bytes_of_the_stand_in() -> None:
    """4 bytes an element of dout, and 4 of a row's delta; in plain torch more than twelve times as many."""
    dout, delta = numbers((64, 1, 8, 64), torch.bfloat16), torch.ones(64, 1, 8)
    with counted(one_kernel=True) as once:
        fused.out_from_delta(dout, delta)
    with counted(one_kernel=False) as before:
        fused.out_from_delta(dout, delta)
    assert once.total == 4 * dout.numel() + 4 * delta.numel()
    assert before.total > 12 * once.total
    with counted(one_kernel=True) as once:
        fused.delta(dout, dout)
    assert once.total == 4 * dout.numel() + 4 * delta.numel()
