"""The short convolution's kernels, interpreted, against plain torch in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cp_kernels import convolution as kernel
from nightly import pairs_at_night
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.kernels import fused

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-7, torch.float32: 2**-21, torch.float64: 2**-48}
"""Half a unit of the last place of a result, and a few of sums; the interpreter cuts bfloat16 off."""
DTYPES = tuple(ROUNDING)


def tables(width: int, tokens: int, halo: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of shuffled tokens, of which some have none before them: before, after, and rows that come back once or twice."""
    generator = torch.Generator().manual_seed(0)
    before = torch.full((width, tokens), -1, dtype=torch.int32)
    after = torch.full((width, tokens + halo), -1, dtype=torch.int32)
    for back in range(width):
        rows = torch.randperm(tokens + halo, generator=generator)[:tokens] if back else torch.arange(tokens)
        before[back] = torch.where((torch.rand(tokens, generator=generator) < 0.7) | (back == 0), rows, -1)
        after[back, rows] = torch.where(before[back] >= 0, torch.arange(tokens), -1).int()
    home = torch.full((2, tokens), -1, dtype=torch.int32)
    home[0, tokens // 2], home[0, 0], home[1, 0] = 2, 0, 1
    return before, after, home


def inputs(shape: tuple[int, int, int], width: int, halo: int, dtype: torch.dtype) -> dict[str, Tensor]:
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, b, c = shape
    shapes = dict(x=shape, halo=(halo, b, c), weight=(c, width), bias=(c,), dout=shape, returned=(3, b, c))
    return {name: normal(size).to(dtype) for name, size in shapes.items()}


def assert_close(got: Tensor, call: Any, *arguments: Tensor | None, dtype: torch.dtype) -> None:
    """Within the rounding of each term: the same call on absolute values says how large they are."""

    def wide(x: Tensor | None, size: bool) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        return x.double().abs() if size else x.double()

    want, sizes = (call(*(wide(x, size) for x in arguments)) for size in (False, True))
    assert got.shape == want.shape
    assert ((got.double() - want).abs() <= ROUNDING[dtype] * sizes).all()


def check(x: Tensor, halo: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, returned: Tensor | None) -> None:
    before, after, home = tables(weight.size(1), len(x), len(halo))
    got = kernel.convolve(x, halo, before, weight, bias)
    assert got.is_contiguous() and got.dtype == x.dtype
    assert_close(got, fused.convolve, x, halo, before, weight, bias, dtype=x.dtype)
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    of_halo, of_x = after[:, len(x) :], after[:, : len(x)]
    for rows, table, *others in ((halo, of_halo), (x, of_x, returned, None if returned is None else home)):
        drows, terms = kernel.convolve_back(dout, rows, table, weight, *others)
        assert drows.is_contiguous() and (drows.dtype, terms.dtype) == (x.dtype, sums)
        arguments = (dout, rows, table, weight, *others)
        assert_close(drows, lambda *g: fused.convolve_back(*g)[0], *arguments, dtype=x.dtype)
        assert_close(terms, lambda *g: fused.convolve_back(*g)[1], *arguments, dtype=sums)


@pairs_at_night
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "width", "halo"), [((5, 2, 6), 4, 3), ((5, 1, 130), 3, 2), ((4, 3, 1), 1, 0), ((14, 2, 3), 13, 12)]
)
def test_any_size_and_dtype(shape: tuple[int, int, int], width: int, halo: int, dtype: torch.dtype) -> None:
    tensors = inputs(shape, width, halo, dtype)
    check(**tensors)
    check(**tensors | {"bias": None, "returned": None})


def test_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, and several steps of each."""
    monkeypatch.setattr(kernel, "ELEMENTS", 64)
    monkeypatch.setattr(kernel, "CHUNK", 8)
    check(**inputs((23, 2, 9), 4, 3, torch.float32))


def test_invalid_arguments_are_refused() -> None:
    tensors = inputs((5, 2, 6), 4, 3, torch.float32)
    x, halo, weight, bias = (tensors[name] for name in ("x", "halo", "weight", "bias"))
    before = tables(4, 5, 3)[0]
    for args, words in (
        ((x, halo.double(), before, weight, bias), r"rows must be \[s, b, c\] of one dtype"),
        ((x.half().to(torch.uint8), halo, before, weight, bias), "torch.uint8"),
        ((x, halo[..., :4], before, weight, bias), r"halo torch.float32 \(3, 2, 4\)"),
        ((x, halo, before, weight[:4], bias), r"must be \[c, w\] and \[c\]"),
        ((x, halo, before, weight, bias[:4]), r"must be \[c, w\] and \[c\]"),
        ((x, halo, before[:3], weight, bias), r"a table must be int32 \[w, rows\], got torch.int32 \(3, 5\)"),
        ((x, halo, before.long(), weight, bias), "got torch.int64"),
        ((x.mT.contiguous().mT, halo, before, weight, bias), "x must have a dense last dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.convolve(*args)


LAYOUTS = {"contiguous": None, "zigzag": (0, 2, 3, 20, 33, 48)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_a_sequence(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole call, with halos and documents: as without kernels."""
    tensors = inputs((48, 2, 6), 4, 0, torch.float64)
    bounds = None if LAYOUTS[layout] is None else torch.tensor(LAYOUTS[layout])
    ran: list[str] = []

    def rank(mesh: Mesh) -> list[Tensor]:
        cp = ContextParallel("lasp2", mesh=mesh, layout=layout)
        leaves = [cp.shard(tensors["x"]), tensors["weight"], tensors["bias"]]
        leaves = [x.detach().clone().requires_grad_() for x in leaves]
        out = short_convolution(cp, *leaves, cu_seqlens=bounds)
        return [out.detach(), *torch.autograd.grad(out, leaves, cp.shard(tensors["dout"]))]

    want = run_threads(rank, {"cp": 4})
    monkeypatch.setattr(fused, "_kernels", lambda x: not ran.append("kernel"))
    for results, expected in zip(run_threads(rank, {"cp": 4}), want, strict=True):
        for a, b in zip(results, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(ran) == 4 * 2 + 3 + (layout == "zigzag"), "forward and backward, the latter also of halos"


def test_a_tap_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = kernel._sizes
    monkeypatch.setattr(kernel, "_sizes", lambda *x: sizes(*x) | {"W": 3})
    with pytest.raises(AssertionError):
        check(**inputs((5, 2, 6), 4, 3, torch.float16))
