"""Autocast follows the rule of torch's own attention: all but float64 is cast to its dtype.

Kind: torch functions have autocast rules, and a function of our own has none. Plain torch ignored autocast, and
``Trainer(bf16=True)`` failed, since RoPE leaves q and k in float32 beside v in bfloat16.
"""

from __future__ import annotations

import pytest
import torch
from nightly import each_value
from torch import Tensor
from torch.nn.functional import conv1d, normalize, pad, scaled_dot_product_attention

from cp_plugin import ContextParallel
from cp_plugin.engine.attention.convolution import short_convolution
from cp_plugin.engine.attention.shift import shift
from cp_plugin.engine.comm import Mesh, run_threads


def inputs(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(32, 1, 4, 8, generator=generator).to(dtype) for dtype in dtypes]
    return [x[0], normalize(x[1], dim=-1), x[2]]


MIXTURES = {
    "float32": (torch.float32,) * 3,
    "RoPE in float32": (torch.float32, torch.float32, torch.bfloat16),
    "bfloat16": (torch.bfloat16,) * 3,
    "float64": (torch.float64,) * 3,
}


@each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("kind", ["softmax", "linear", "delta"])
def test_the_result_is_that_of_tensors_cast_by_torch(kind: str, mixture: str, dtype: torch.dtype) -> None:
    """Bit by bit that of arguments cast by hand, outputs and gradients; its dtype is that of torch's own attention."""
    whole = inputs(*MIXTURES[mixture])
    with torch.autocast("cpu", dtype):
        want = scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in whole)).dtype

    def rank(mesh: Mesh) -> None:
        cp = ContextParallel("ring" if kind == "softmax" else "lasp2", mesh=mesh)
        beta = torch.full((32 // cp.size, 1, 4), 0.5) if kind == "delta" else None

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return cp.attention(q, k, v) if kind == "softmax" else cp.linear_attention(q, k, v, beta=beta)

        under = [cp.shard(x).requires_grad_() for x in whole]
        by_hand = [x.detach().to(want).requires_grad_() for x in under]
        with torch.autocast("cpu", dtype):
            got = call(*under)
            got.float().square().sum().backward()  # called under autocast, as some users do
        expected = call(*by_hand)
        expected.float().square().sum().backward()
        assert got.dtype == expected.dtype == want
        assert torch.equal(got, expected)
        for a, b in zip(under, by_hand, strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad.to(a.dtype))

    run_threads(rank, {"cp": 2})


def test_a_convolution() -> None:
    x, weight, bias = torch.randn(32, 1, 6), torch.randn(6, 4), torch.randn(6)
    cp = ContextParallel("lasp2")
    with torch.autocast("cpu", torch.bfloat16):
        got = short_convolution(cp, x, weight, bias)
        want = conv1d(pad(x.permute(1, 2, 0), (3, 0)), weight[:, None], bias, groups=6).permute(2, 0, 1)
    assert got.dtype == want.dtype == torch.bfloat16 and (got - want).abs().max() < 0.1


@pytest.mark.parametrize("cast_to", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool], ids=str
)
def test_moves_of_tokens_keep_every_dtype(dtype: torch.dtype, cast_to: torch.dtype | None) -> None:
    """torch's ``cat`` raises for tensors of another half precision than autocast's."""

    def rank(mesh: Mesh) -> None:
        cp = ContextParallel("ring", mesh=mesh, layout="zigzag")
        x = torch.arange(16).remainder(5).to(dtype).requires_grad_(dtype.is_floating_point)
        with torch.autocast("cpu", cast_to, enabled=cast_to is not None):
            own = cp.shard(x)
            whole, moved = cp.unshard(own), cp.unshard(shift(cp, own))
            if x.requires_grad:
                (whole + moved).backward(torch.ones_like(whole))
        assert own.dtype == whole.dtype == moved.dtype == dtype
        assert torch.equal(whole, x) and torch.equal(moved[:-1], x[1:])

    run_threads(rank, {"cp": 2})
