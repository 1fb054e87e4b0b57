"""FP8 payloads: the torch version against their definition, and the kernels bit for bit against torch."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import pytest
import torch
from cp_kernels import payload as kernel
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import pairs_at_night
from torch import Tensor

from cp_plugin.engine.core import payload

inf, nan = torch.inf, torch.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
DTYPES = payload.DTYPES
INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""All non-negative numbers in order: 0 .. 448."""


def from_bits(bits: list[int], dtype: torch.dtype) -> Tensor:
    """Numbers from the lowest 16 or 32 bits: ``[s, 1, 1, 2]``."""
    size = 8 * dtype.itemsize
    signed = [(b % 2**size) - 2**size * (b % 2**size >= 2 ** (size - 1)) for b in bits]
    return torch.tensor(signed, dtype=INTEGERS[dtype]).view(dtype).view(-1, 1, 1, 2)


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Every magnitude per head and token, with NaN and infinities."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**31), 2**31, shape, generator=generator)
    x = from_bits(raw.flatten().tolist(), dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    mild = torch.randn(shape, generator=generator).to(dtype)
    return torch.where(torch.rand(shape[:3], generator=generator).unsqueeze(-1) < 0.3, x, mild)


any_bits = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9).map(lambda half: half + half[::-1])
any_dtype = st.sampled_from(DTYPES)
checks = settings(max_examples=150, derandomize=True)

both = pytest.mark.parametrize("module", [payload, kernel], ids=["torch", "kernel"])


def hop(x: Tensor, block: int, module: ModuleType = payload) -> Tensor:
    return module.unpack(*module.pack(x, block), block, x.dtype)


@checks
@given(any_bits, any_dtype, st.integers(1, 9))
def test_a_second_hop_changes_no_bit(bits: list[int], dtype: torch.dtype, block: int) -> None:
    once = hop(from_bits(bits, dtype), block)
    twice = hop(once, block)
    assert torch.equal(once.isnan(), twice.isnan())
    assert torch.equal(once.view(INTEGERS[dtype])[~once.isnan()], twice.view(INTEGERS[dtype])[~once.isnan()])


@checks
@given(any_bits, any_dtype, st.integers(1, 9))
def test_scales_are_the_smallest_that_fit(bits: list[int], dtype: torch.dtype, block: int) -> None:
    x = from_bits(bits, dtype)
    elements, exponents = payload.pack(x, block)
    sizes = torch.where(x.isfinite(), x.double().abs(), 0.0)
    for i, exponent in enumerate(exponents.flatten().tolist()):
        largest = sizes[i * block : (i + 1) * block].max().item()
        assert 1 <= exponent <= 247
        assert largest <= 448 * 2.0 ** (exponent - 127)
        assert exponent == 1 or largest > 448 * 2.0 ** (exponent - 128)
    assert elements.double().nan_to_num().abs().max() <= 448


@both
def test_rounding_is_to_nearest_and_even(module: ModuleType) -> None:
    """Every e4m3 number, every midpoint, and their float32 neighbours; 448 sets the scale to 1."""
    middles = ((E4M3[1:] + E4M3[:-1]) / 2).float()
    x = torch.cat([E4M3.float(), middles, middles.nextafter(torch.tensor(inf)), middles.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, -x]).view(1, 1, 1, -1)
    elements, exponents = module.pack(x, 1)
    assert exponents.item() == 127
    apart = (x.double().abs().view(-1, 1) - E4M3).abs()
    nearest = apart == apart.amin(1, keepdim=True)
    codes = torch.arange(127)
    even = torch.where(nearest.sum(1) == 2, (nearest & (codes % 2 == 0)).int().argmax(1), nearest.int().argmax(1))
    assert torch.equal(elements.view(torch.uint8).flatten() & 0x7F, even.to(torch.uint8))
    assert torch.equal(elements.float().signbit(), x.signbit())


@both
def test_ends_of_the_range(module: ModuleType) -> None:
    def one(number: float, dtype: torch.dtype = torch.float32) -> tuple[float, int]:
        elements, exponents = module.pack(torch.full((1, 1, 1, 1), number, dtype=dtype), 1)
        return module.unpack(elements, exponents, 1, dtype).item(), int(exponents)

    assert one(0.0) == (0.0, 1) and one(448.0) == (448.0, 127) and one(449.0) == (448.0, 128)
    assert one(1e-40)[1] == 1 and abs(one(1e-40)[0] - 1e-40) <= 2.0**-136
    assert one(1e-45) == (0.0, 1), "less than half of the smallest number there is at the smallest scale"
    assert one(2.0**-133, torch.bfloat16) == (2.0**-133, 1) and one(2.0**-24, torch.float16) == (2.0**-24, 95)
    assert one(3e38)[1] == 247 and abs(one(3e38)[0] - 3e38) <= 3e38 / 16
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        assert one(largest, dtype)[0] == largest and one(-largest, dtype)[0] == -largest, "and not an infinity"


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@both
def test_nonfinite_values_do_not_spread(bad: float, module: ModuleType) -> None:
    x = torch.randn(4, 1, 2, 8, generator=torch.Generator().manual_seed(0))
    want = hop(x, 4, module)
    x[1, 0, 0, 3] = bad
    got = hop(x, 4, module)
    assert got[1, 0, 0, 3].isnan() and got.isnan().sum() == 1
    others = torch.ones_like(x, dtype=torch.bool)
    others[1, 0, 0, 3] = False
    assert torch.equal(got[others], want[others])
    everywhere = torch.full((3, 1, 1, 2), bad)
    assert hop(everywhere, 2, module).isnan().all()


def check_same(x: Tensor, block: int) -> None:
    """The kernels against plain torch, bit for bit; only positions of NaN are compared."""
    (elements, exponents), want = kernel.pack(x, block), payload.pack(x, block)
    assert elements.is_contiguous() and exponents.is_contiguous() and elements.dtype == torch.float8_e4m3fn
    assert torch.equal(exponents, want[1])
    assert torch.equal(elements.view(torch.uint8), want[0].view(torch.uint8))
    got, want = kernel.unpack(elements, exponents, block, x.dtype), payload.unpack(*want, block, x.dtype)
    assert got.dtype == x.dtype and torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(INTEGERS[x.dtype])[~got.isnan()], want.view(INTEGERS[x.dtype])[~want.isnan()])


def test_blocks_that_do_not_fit_in_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "ELEMENTS", 32)
    kernel._planned.cache_clear()
    for block in (3, 8, 11):
        check_same(numbers((21, 1, 2, 8), torch.bfloat16), block)


PARTS = {
    "k and v": ([(2, 3, 64), (2, 3, 40)], [(8, 0, 3, 10)] * 2),
    "of one row each": ([(1, 1, 16), (1, 1, 16)], [(1,) * 9] * 2),
    "one part": ([(1, 2, 8)], [(21,)]),
    "of several lengths": ([(2, 1, 6), (1, 5, 4), (2, 1, 2)], [(4, 4), (7, 0), (0, 9)]),
    "none": ([(1, 2, 8)], [(0, 0)]),
    "of no size": ([(1, 2, 0)], [(0, 0)]),
}


def message(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Tensors of several dtypes, and their rows; the first is a slice of the heads."""
    shapes, rows = PARTS[name]
    kinds = [dtype, torch.float16, torch.float32]
    tensors = [numbers((sum(of), *shape), kind) for of, shape, kind in zip(rows, shapes, kinds, strict=False)]
    return [torch.cat((tensors[0], tensors[0]), 2)[:, :, : tensors[0].size(2)], *tensors[1:]], rows


def check_message(tensors: list[Tensor], rows: list[tuple[int, ...]], block: int) -> None:
    """Bit for bit as each part of each tensor by itself, one after the other."""
    got = kernel.pack_message(tensors, rows, block)
    parts = zip(*(x.split(of) for x, of in zip(tensors, rows, strict=True)), strict=True)
    each = [x.contiguous() for part in parts for x in part]
    want = torch.cat([y.view(torch.uint8).flatten() for x in each for y in payload.pack(x, block)])
    assert torch.equal(got, want) and torch.equal(want, payload.pack_message(tensors, rows, block))
    like = [tuple(x.shape[1:]) for x in tensors], [x.dtype for x in tensors], rows, block
    for pair in zip(kernel.unpack_message(got, *like), payload.unpack_message(got, *like), tensors, strict=True):
        assert pair[0].is_contiguous() and {(x.dtype, x.shape) for x in pair} == {(pair[2].dtype, pair[2].shape)}
        bits, expected = (x.view(INTEGERS[x.dtype])[~x.isnan()] for x in pair[:2])
        assert torch.equal(pair[0].isnan(), pair[1].isnan()) and torch.equal(bits, expected)


@pairs_at_night
@pytest.mark.parametrize("block", [64, 4, 1])
@pytest.mark.parametrize("name", PARTS)
def test_a_message_of_many_parts(name: str, block: int) -> None:
    check_message(*message(name), block)


@pytest.mark.parametrize(("heads", "rows", "aligned"), [(16, (64, 128), 16), (1, (64, 64, 64), 1), (2, (20, 80), 2)])
def test_elements_begin_where_the_kernel_is_told(heads: int, rows: tuple[int, ...], aligned: int) -> None:
    """A promise of 16 bytes that does not hold would be a misaligned address on a GPU: the interpreter keeps silent."""
    plan = kernel._planned((rows, rows), ((1, heads, 64), (1, heads, 64)), 64, torch.device("cpu"))
    assert plan.sizes["ALIGNED"] == aligned
    assert not (plan.table[:, :, 2] % aligned).any()


def test_parts_that_do_not_fit_are_refused() -> None:
    tensors, rows = message("k and v")
    with pytest.raises(ValueError, match=r"parts of \[8, 0, 3, 9\] tokens do not add up to \(21, 2, 3, 64\)"):
        kernel.pack_message(tensors, [(8, 0, 3, 9), rows[1]], 4)
    like = [tuple(x.shape[1:]) for x in tensors], [x.dtype for x in tensors], rows, 4
    for wrong in (torch.zeros(7, dtype=torch.uint8), kernel.pack_message(tensors, rows, 4).view(torch.int8)):
        with pytest.raises(ValueError, match=r"is uint8 \[13176\], and is unpacked to .*: got"):
            kernel.unpack_message(wrong, *like)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_of_the_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of devices with e4m3 instructions, for exact values: the interpreter truncates others and has no NaN."""
    monkeypatch.setattr(kernel, "converts", lambda x: True)
    x = torch.cat([E4M3, -E4M3]).to(dtype).view(2, 1, 1, 127)
    check_same(x, 1)


@both
def test_invalid_arguments_are_refused(module: ModuleType) -> None:
    x = torch.zeros(4, 1, 2, 8)
    packed = module.pack(x, 2)
    for call, words in (
        (partial(module.pack, x.double(), 2), "torch.float64"),
        (partial(module.pack, x[0], 2), r"\(1, 2, 8\)"),
        (partial(module.pack, x, 0), "at least one token|blocks of 0"),
        (partial(module.unpack, *packed, 2, torch.float64), "torch.float64"),
        (partial(module.unpack, *packed, 4, torch.float16), r"exponents must be torch\.uint8"),
        (partial(module.unpack, x, packed[1], 2, torch.float16), "torch.float32"),
        (partial(module.unpack, packed[0], packed[1].int(), 2, torch.float16), "torch.int32"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="dense last dimension"):
        kernel.pack(x[..., ::2], 2)
