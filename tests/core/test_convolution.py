"""Short convolutions of sharded sequences: results and gradients of a whole one; only rows that are seen are sent."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from oracle import no_sums_in_half
from torch import Tensor
from torch.nn.functional import conv1d, pad

from cp_plugin import ContextParallel
from cp_plugin.attention.convolution import short_convolution
from cp_plugin.attention.packs import place_documents
from cp_plugin.comm import Mesh, run_threads

S, B, C = 48, 2, 6
BOUNDS = (0, 2, 3, 20, 33, 48)
"""Documents shorter than the convolution, cut by a rank's border, and at one."""


def inputs(width: int) -> tuple[Tensor, ...]:
    """x, weight, bias and the gradient of the result."""
    g = torch.Generator().manual_seed(0)
    shapes = (S, B, C), (C, width), (C,), (S, B, C)
    return tuple(torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)


def whole(width: int, bounds: tuple[int, ...] | None) -> list[Tensor]:
    """Result and gradients, by torch's convolution of each document."""
    *given, dout = inputs(width)
    x, weight, bias = (y.requires_grad_() for y in given)
    ends = bounds or (0, S)
    parts = [x[a:b].permute(1, 2, 0) for a, b in pairwise(ends)]
    found = [conv1d(pad(part, (width - 1, 0)), weight.unsqueeze(1), bias, groups=C) for part in parts]
    out = torch.cat(found, 2).permute(2, 0, 1)
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), dout)]


def on_shards(cp: ContextParallel, width: int, bounds: tuple[int, ...] | None) -> list[Tensor]:
    """Of this rank's tokens: result, gradient of x, and shares of the gradients of weight and bias."""
    *given, dout = inputs(width)
    x, weight, bias = (y.detach().requires_grad_() for y in (cp.shard(given[0]), *given[1:]))
    out = short_convolution(cp, x, weight, bias, cu_seqlens=None if bounds is None else torch.tensor(bounds))
    return [out.detach(), *torch.autograd.grad(out, (x, weight, bias), cp.shard(dout))]


def sharded(cp: ContextParallel, width: int, bounds: tuple[int, ...] | None) -> list[Tensor]:
    out, dx, *shares = on_shards(cp, width, bounds)
    return [cp.unshard(out), cp.unshard(dx), *shares]


def assert_equal(ranks: list[list[Tensor]], want: list[Tensor]) -> None:
    """Shares of parameters' gradients are summed over the ranks."""
    shares = [torch.stack(each).sum(0) for each in zip(*(found[2:] for found in ranks), strict=True)]
    for found in ranks:
        for got, expected in zip([*found[:2], *shares], want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("bounds", [None, BOUNDS], ids=["one", "packed"])
@pytest.mark.parametrize("width", [1, 4, 13])
def test_as_on_one_rank(layout: str, bounds: Any, width: int) -> None:
    """A width of 13 reaches over more than one rank."""
    for size in (1, 2, 4, 8):
        ranks = run_threads(
            lambda mesh: sharded(ContextParallel("lasp2", mesh=mesh, layout=layout), width, bounds), {"cp": size}
        )
        assert_equal(list(ranks), whole(width, bounds))


@pytest.mark.parametrize("size", [2, 4])
def test_placed_documents(size: int) -> None:
    def rank(mesh: Mesh) -> list[Tensor]:
        cp = place_documents(ContextParallel("lasp2", mesh=mesh, layout="documents"), torch.tensor(BOUNDS))
        return sharded(cp, 4, BOUNDS)

    assert_equal(list(run_threads(rank, {"cp": size})), whole(4, BOUNDS))


def test_half_precision() -> None:
    """At most twice the error of one rank, whose gradients torch sums itself."""
    *given, dout = (y.bfloat16() for y in inputs(4))

    def rank(cp: ContextParallel) -> list[Tensor]:
        x, weight, bias = (y.detach().requires_grad_() for y in (cp.shard(given[0]), *given[1:]))
        with no_sums_in_half(torch.bfloat16):
            out = short_convolution(cp, x, weight, bias)
            assert out.dtype == torch.bfloat16
            dx, *shares = torch.autograd.grad(out, (x, weight, bias), cp.shard(dout))
        return [cp.unshard(out.detach()), cp.unshard(dx), *shares]

    want = whole(4, None)
    alone = [(a.double() - b).norm() / b.norm() for a, b in zip(rank(ContextParallel("lasp2")), want, strict=True)]
    ranks = run_threads(lambda mesh: rank(ContextParallel("lasp2", mesh=mesh, layout="zigzag")), {"cp": 4})
    for got, expected, error in zip(ranks[1][:2], want[:2], alone[:2], strict=True):
        assert error <= 5e-3 and (got.double() - expected).norm() / expected.norm() <= 2 * error


@pytest.mark.parametrize(
    ("layout", "bounds", "rows"),
    [("contiguous", None, (3, 3, 3, 0)), ("zigzag", None, (3, 6, 6, 3)), ("contiguous", (0, 12, 22, 48), (0, 2, 3, 0))],
)
def test_rows_sent(layout: str, bounds: Any, rows: tuple[int, ...]) -> None:
    """w - 1 for each run that another rank continues, up to a document's start; as many gradients come back."""

    def rank(mesh: Mesh) -> tuple[int, int]:
        on_shards(ContextParallel("lasp2", mesh=mesh, layout=layout), 4, bounds)
        return tuple(mesh.ledger.bytes(phase=phase) for phase in ("forward", "backward"))

    forward, backward = zip(*run_threads(rank, {"cp": 4}), strict=True)
    row = B * C * 8
    assert forward == tuple(n * row for n in rows)
    assert sum(backward) == sum(forward)


@pytest.mark.parametrize(
    ("provider", "weight", "message"),
    [
        (
            "ring",
            (C, 4),
            "'ring' is for softmax attention: short convolutions belong to linear attention; use.* lasp2",
        ),
        ("lasp2", (C + 1, 4), r"must be \[s, b, c\], \[c, w\] and \[c\], got \[\(48, 2, 6\), \(7, 4\), \(6,\)\]"),
        ("lasp2", (C, 4, 1), r"got \[\(48, 2, 6\), \(6, 4, 1\), \(6,\)\]"),
        ("lasp2", (C, 4), r"got \[\(48, 2, 6\), \(6, 4\), \(7,\)\]"),
    ],
)
def test_refusals(provider: str, weight: tuple[int, ...], message: str) -> None:
    bias = torch.randn(C + (weight == (C, 4)))  # the only one that is wrong
    with pytest.raises(ValueError, match=message):
        short_convolution(ContextParallel(provider), torch.randn(S, B, C), torch.randn(weight), bias)
