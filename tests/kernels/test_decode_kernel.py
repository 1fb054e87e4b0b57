"""Decoding kernels, interpreted, against float64 and plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cp_kernels import decode as kernel
from nightly import pairs_at_night
from operations import run
from oracle import attend_to_slots
from torch import Tensor

from cp_plugin.engine.core import payload
from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.inference import store
from cp_plugin.engine.inference.slots import NOWHERE
from cp_plugin.engine.inference.store import Cache, Latent
from cp_plugin.engine.kernels import fused

inf, nan = torch.inf, torch.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf - -inf
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""By dtype of the cache: weights are rounded to it, and the interpreter truncates bfloat16."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def books(lengths: list[int], slots: int, tokens: int = 1) -> tuple[Tensor, Tensor]:
    """Slot positions of one rank of two (the even positions), and positions of the tokens after them."""
    held = torch.full((slots, len(lengths)), NOWHERE, dtype=torch.int32)
    for i, n in enumerate(lengths):
        held[:n, i] = 2 * torch.arange(n)
    last = 2 * torch.tensor(lengths, dtype=torch.int32)
    return held, last + torch.arange(tokens, dtype=torch.int32)[:, None]


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    positions: Tensor,
    left: int = -1,
    parts: int | None = None,
    **cap: float,
) -> None:
    scale = q.size(3) ** -0.5
    outs, lses = kernel.decode(q, (k, None), (v, None), v.size(3), held, positions, scale, left, **cap)
    assert outs.dtype == lses.dtype == torch.float32 and (parts is None or outs.size(0) == parts)
    out, lse = kernel.merge_parts(outs, lses)
    want_out, want_lse = attend_to_slots(q, k, v, held, positions, scale, left, **cap)
    nothing = want_lse == -inf
    assert torch.equal(lse == -inf, nothing) and not out[nothing].any()
    torch.testing.assert_close(lse.double()[~nothing], want_lse[~nothing], rtol=1e-5, atol=1e-5)
    error = (out.double() - want_out).norm() / want_out.norm().clamp(min=1e-30)
    assert error <= ERROR[q.dtype], error


@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize(
    ("d", "e"), [(16, 16), (40, 24), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512)]
)
def test_any_size_and_dtype(d: int, e: int, dtype: torch.dtype) -> None:
    held, positions = books([37, 20], 40)
    k, v = (normal(40, 2, 2, n, dtype=dtype, seed=n + 1) for n in (d, e))
    check(normal(1, 2, 4, d, dtype=dtype), k, v, held, positions)


def test_capped_scores() -> None:
    k, v = (normal(40, 2, 2, 16, seed=n) for n in (3, 4))
    check(normal(1, 2, 4, 16), k, v, *books([37, 20], 40), softcap=0.5)


@pairs_at_night
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (3, 1), (20, 1), (80, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 3])
def test_heads_that_share_keys_are_rows_of_one_product(heads: tuple[int, int], tokens: int) -> None:
    """Also more rows than a block has, and several tokens, each of which sees one more."""
    (h, g), (held, positions) = heads, books([33, 7], 40, tokens)
    held[33, 0] = positions[0, 0]
    check(normal(tokens, 2, h, 16), normal(40, 2, g, 16, seed=1), normal(40, 2, g, 16, seed=2), held, positions)


@pytest.mark.parametrize("slots", [0, 1, 3, 64, 65, 255, 256, 700, 1500])
def test_caches_of_any_length(slots: int) -> None:
    lengths = [slots, slots // 2, 0]
    held, positions = books(lengths, slots)
    parts = kernel.parts_of(slots, 3, 32)[0]
    tensors = normal(1, 3, 2, 16), normal(slots, 3, 1, 16, seed=1), normal(slots, 3, 1, 16, seed=2)
    check(*tensors, held, positions, parts=parts)
    assert parts == {1500: 10, 700: 5, 256: 2, 255: 2}.get(slots, 1)


@pytest.mark.parametrize("left", [0, 5, 70, 2**31 - 1])
def test_windows(left: int) -> None:
    held, positions = books([300, 90], 300, tokens=2)
    tensors = normal(2, 2, 2, 16), normal(300, 2, 1, 16, seed=1), normal(300, 2, 1, 16, seed=2)
    check(*tensors, held, positions, left=left)


@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("what", [nan, inf, -inf])
def test_nothing_of_unused_slots_leaks(what: float, dtype: torch.dtype) -> None:
    held, positions = books([30, 9], 70)
    held[4:6] = NOWHERE  # padding within a prompt
    q, k, v = (normal(n, 2, 2, 32, dtype=dtype, seed=n) for n in (1, 70, 71))
    v = v[:70]
    clean = kernel.merge_parts(*kernel.decode(q, (k, None), (v, None), 32, held, positions, 0.2, -1))
    unused = held == NOWHERE
    k[unused] = v[unused] = what
    got = kernel.merge_parts(*kernel.decode(q, (k, None), (v, None), 32, held, positions, 0.2, -1))
    assert all(x.isfinite().all() and torch.equal(x, y) for x, y in zip(got, clean, strict=True))


def test_nonfinite_slots_affect_their_head_only() -> None:
    held, positions = books([600], 600)
    q, k, v = (normal(n, 1, 2, 16, seed=n) for n in (1, 600, 601))
    v = v[:600]
    k[300, 0, 0, 3] = nan
    out, lse = kernel.merge_parts(*kernel.decode(q, (k, None), (v, None), 16, held, positions, 0.2, -1))
    assert lse[0, 0, 0].isnan() and out[0, 0, 0].isnan().all() and out[0, 0, 1].isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 7, 128])
@pytest.mark.parametrize("e", [16, 80, 512])
def test_parts_are_merged(count: int, e: int) -> None:
    outs, lses = normal(count, 2, 1, 3, e), normal(count, 2, 1, 3, seed=1) * 20
    lses[0, 0] = lses[:, 1, 0, 1] = -inf
    outs[lses == -inf] = 0.0
    for got, want in zip(kernel.merge_parts(outs, lses), fused.merge_parts(outs, lses), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def compare(*args: Any) -> None:
    """Attention of one rank to a cache by the kernels and in plain torch."""
    ran: list[str] = []
    with fused.observed(lambda name, operation, _: (ran.append(name), operation())[1]):
        got = run(lambda: store.attend(*args), kernels=True)
    assert ran == ["decode", "merge_parts"], "two launches whatever the length"
    limit = ERROR[args[0].dtype]
    for a, b in zip(got, run(lambda: store.attend(*args), kernels=False), strict=True):
        assert torch.equal(a == -inf, b == -inf)
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


@pairs_at_night
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", kernel.DTYPES)
@pytest.mark.parametrize("slots", [5, 600])
def test_a_cache_of_heads(slots: int, dtype: torch.dtype, fp8: bool) -> None:
    k, v = normal(slots, 2, 2, 48, dtype=dtype), normal(slots, 2, 2, 32, dtype=dtype, seed=1)
    k[1, 0] *= 1000  # exponents differ
    cache = Cache(slots + 3, 32, k, v, fp8=fp8)
    cache.put(slice(len(k)), k, v)
    held, positions = books([slots, 3], slots)
    compare(normal(1, 2, 4, 48, dtype=dtype), cache, held, positions, Scores(0.1), (90, 0))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rank", [32, 40])
def test_a_cache_of_latents(rank: int, fp8: bool) -> None:
    """Values are the first part of the keys: read once if that is a power of two."""
    rows = normal(300, 2, 1, rank + 8)
    latent = Latent(rows, normal(4, 16, rank), normal(4, 16, rank))
    cache = Cache(300, rank, rows, fp8=fp8)
    cache.put(slice(len(rows)), rows)
    held, positions = books([300, 31], 300)
    q = latent.queries(normal(1, 2, 4, 24, seed=3))
    compare(q, cache, held, positions, Scores(0.1), None)


@pytest.mark.parametrize("dtype", kernel.DTYPES)
def test_packed_rows_are_widened_as_payloads_are(dtype: torch.dtype) -> None:
    """Every byte: with one slot, its value is the output. NaN stays NaN, overflow saturates."""
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    held, positions = books([1], 1)
    keys = torch.zeros(1, 1, 1, 16, dtype=torch.uint8), torch.full((1, 1, 1), 127, dtype=torch.uint8)
    for exponent in (20, 100, 127, 134, 254):  # less is not exact in bfloat16
        values = every, torch.full((1, 1, 1), exponent, dtype=torch.uint8)
        outs, _ = kernel.decode(torch.zeros(1, 1, 1, 16, dtype=dtype), keys, values, 256, held, positions, 1.0, -1)
        want = payload.unpack(every, values[1], 1, dtype).float()
        torch.testing.assert_close(outs[0], want, rtol=0, atol=0, equal_nan=True)


def test_strides() -> None:
    """Arbitrary strides of slots, sequences and heads."""
    held, positions = books([50, 13], 64)
    q = normal(2, 4, 1, 16).permute(2, 0, 1, 3)
    k, v = normal(2, 2, 64, 40).permute(2, 0, 1, 3)[..., 3:19], normal(64, 4, 2, 16)[:, ::2]
    check(q, k, v, held.T.contiguous().T, positions)


def test_offsets_beyond_32_bits() -> None:
    """Two slots 2^31 bytes apart, with untouched memory between them."""
    far = torch.empty(2**31 + 32, dtype=torch.uint8).as_strided((2, 1, 1, 16), (2**31, 16, 16, 1))
    far[:] = payload.pack(normal(2, 1, 1, 16), 1)[0].view(torch.uint8)
    near, exponents = far.contiguous(), torch.full((2, 1, 1), 127, dtype=torch.uint8)
    held, positions = books([2], 2)
    results = [
        kernel.decode(normal(1, 1, 2, 16, seed=1), (x, exponents), (x, exponents), 16, held, positions, 1.0, -1)
        for x in (far, near)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and results[0][0].any()


def test_parts_depend_on_shapes_alone_and_have_blocks_enough() -> None:
    assert kernel.parts_of(0, 1, 64) == (1, 64) and kernel.parts_of(1, 1, 64) == (1, 64)
    assert kernel.parts_of(131072, 8, 64) == (33, 63 * 64)
    for slots in (1, 63, 64, 1000, 131072, 2**20 + 1):
        for programs in (1, 8, 100, 10**4):
            parts, each = kernel.parts_of(slots, programs, 64)
            assert 1 <= parts <= kernel.MOST_PARTS and each % 64 == 0
            assert (parts - 1) * each < slots <= parts * each


def test_refusals_name_the_argument() -> None:
    held, positions = books([4], 4)

    def call(q: Tensor, keys: Any, values: Any, e: int = 16, held: Tensor = held) -> None:
        kernel.decode(q, keys, values, e, held, positions, 1.0, -1)

    q, k = normal(1, 1, 2, 16), normal(4, 1, 1, 16)
    exponents = torch.ones(4, 1, 1, dtype=torch.uint8)
    for call_with, words in (
        ((q.double(), (k.double(), None), (k.double(), None)), "not torch.float64"),
        ((normal(1, 1, 1, 600), (normal(4, 1, 1, 600), None), None), "up to 576"),
        ((q, (k, None), None, 32), "up to 576, got 16 and 32"),
        ((q, (k.half(), None), (k, None)), "keys must be torch.float32"),
        ((q, (k, None), (k[:3], None)), "values must be"),
        ((normal(1, 1, 3, 16), (normal(4, 1, 2, 16), None), (normal(4, 1, 2, 16), None)), "not a multiple"),
        ((q, (k, exponents), (k, exponents)), "keys must be torch.uint8"),
        ((q, (k.byte(), exponents[:3]), (k.byte(), exponents)), "exponents of keys"),
        ((q, (k.byte(), exponents), (k, None)), "both be packed"),
        ((q, (k, None), (k, None), 16, held.long()), "held must be torch.int32"),
        ((q, (normal(4, 1, 16, 2).mT, None), None), "dense"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            call(*call_with)
