"""The merging kernel, interpreted, against float64. Any size, dtype, strides and number of partials: ``test_fused``."""

from __future__ import annotations

import pytest
import torch
from cp_kernels import merge as kernel
from torch import Tensor

inf, nan = torch.inf, torch.nan
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of log(0) and of 0 / 0

SHAPE = (5, 2, 3)
"""Tokens, batch, heads."""


def partials(n: int, e: int) -> tuple[Tensor, Tensor]:
    """``[n, s, b, h, e]`` and ``[n, s, b, h]``; some rows saw nothing in some partials, one in none."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn((n, *SHAPE, e), generator=generator)
    lses = torch.randn((n, *SHAPE), generator=generator) * 20
    lses[:, 0, 1, 2] = lses[0, 1] = lses[-1, 2, 0] = -inf
    outs[lses == -inf] = 0.0
    return outs, lses


def merge_exactly(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """In float64 and unlike the kernel: as sums of unnormalised exponentials."""
    weights = lses.double().exp()
    total = weights.sum(0)
    out = (outs.double() * weights.unsqueeze(-1)).sum(0) / total.unsqueeze(-1)
    return torch.where(total.unsqueeze(-1) == 0, 0.0, out), total.log()


def check(outs: Tensor, lses: Tensor, got: tuple[Tensor, Tensor]) -> None:
    out, lse = merge_exactly(outs, lses)
    torch.testing.assert_close(got[0].double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), lse, rtol=1e-6, atol=1e-6)


def test_chunks_are_one_argument() -> None:
    outs, lses = partials(4, 8)
    assert kernel._evenly_apart(outs.unbind(), lses.unbind()) == (4, (outs.stride(0), lses.stride(0)))
    assert kernel._evenly_apart(outs.flip(0).unbind()[::-1], lses.unbind())[1][0] == -outs.stride(0)
    for other in ([*outs[:3], outs[3].clone()], [outs[0], outs[1], outs[3], outs[2]], [outs[0], *outs[:3].double()]):
        assert kernel._evenly_apart(other, lses.unbind())[0] == 1


def test_large_log_sum_exps_do_not_overflow() -> None:
    outs, lses = partials(3, 4)
    out, lse = kernel.merge(outs.unbind(), (lses + 1000).unbind())
    want, whole = merge_exactly(outs, lses)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-3)  # lses + 1000 has lost as many digits
    torch.testing.assert_close(lse.double(), whole + 1000, rtol=1e-6, atol=1e-6)


def test_invalid_arguments_are_refused() -> None:
    outs, lses = (x.unbind() for x in partials(2, 4))
    for bad_outs, bad_lses, words in (
        ((), (), "no partials"),
        (outs, lses[:1], "do not match"),
        ((outs[0], outs[1][:3]), lses, "all of one shape"),
        (outs, (lses[0], lses[1][:, :1]), "all of one shape"),
        (outs, (lses[0], lses[1].half()), "all be float32 or all float64"),
        ((outs[0], torch.cat([outs[1]] * 2, -1)[..., ::2]), lses, "dense last dimension"),
    ):
        with pytest.raises(ValueError, match=words):
            kernel.merge(bad_outs, bad_lses)
    with pytest.raises(ValueError, match="dtype of the lse"):
        kernel.merge_into(outs[0].half(), lses[0], outs[1], lses[1])
    with pytest.raises(ValueError, match=r"rows of lse .* share memory"):
        kernel.merge_into(outs[0], lses[0][:1].expand(SHAPE), outs[1], lses[1])
