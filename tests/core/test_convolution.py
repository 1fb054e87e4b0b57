"""What a short convolution of a sharded sequence sends and refuses; that it is right: ``test_fuzz_calls``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import no_sums_in_half
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.attention.convolution import short_convolution
from cp_plugin.comm import Mesh, run_threads

S, B, C = 48, 2, 6


def on_shards(cp: ContextParallel, dtype: torch.dtype, bounds: tuple[int, ...] | None = None) -> list[Tensor]:
    """Of this rank's tokens: the result and the gradients of x, weight and bias."""
    shapes = (S // cp.size, B, C), (C, 4), (C,)
    leaves = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    out = short_convolution(cp, *leaves, cu_seqlens=None if bounds is None else torch.tensor(bounds))
    return [out, *torch.autograd.grad(out.sum(), leaves)]


def test_sums_are_not_in_half_precision() -> None:
    def rank(mesh: Mesh) -> None:
        with no_sums_in_half(torch.bfloat16):
            found = on_shards(ContextParallel("lasp2", mesh=mesh, layout="zigzag"), torch.bfloat16)
        assert {x.dtype for x in found} == {torch.bfloat16}

    run_threads(rank, {"cp": 4})


@pytest.mark.parametrize(
    ("layout", "bounds", "rows"),
    [("contiguous", None, (3, 3, 3, 0)), ("zigzag", None, (3, 6, 6, 3)), ("contiguous", (0, 12, 22, 48), (0, 2, 3, 0))],
)
def test_rows_sent(layout: str, bounds: Any, rows: tuple[int, ...]) -> None:
    """w - 1 for each run that another rank continues, up to a document's start; as many gradients come back."""

    def rank(mesh: Mesh) -> tuple[int, int]:
        on_shards(ContextParallel("lasp2", mesh=mesh, layout=layout), torch.float64, bounds)
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
