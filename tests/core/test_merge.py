"""Merging partial attention: exact, in any order, with empty rows and NaN."""

from __future__ import annotations

import itertools

import torch

from cp_plugin.core.values import Partial
from cp_plugin.kernels.merge import add, merge, merge_rows, widened

inf = torch.inf


def attend(scores: torch.Tensor, v: torch.Tensor) -> Partial:
    """Partials ``[s, 1, 1, e]`` from scores ``[s, k]``."""
    lse = scores.logsumexp(-1)
    p = torch.where(scores == -inf, 0.0, (scores - lse[:, None]).exp())
    return Partial((p @ v)[:, None, None], lse[:, None, None])


def test_any_split_in_any_order() -> None:
    torch.manual_seed(0)
    scores, v = torch.randn(5, 9, dtype=torch.float64) * 30, torch.randn(9, 4, dtype=torch.float64)
    scores[0, :6] = -inf
    want = attend(scores, v)
    parts = [slice(0, 3), slice(3, 4), slice(4, 9)]
    for order in itertools.permutations(parts):
        total = None
        for keys in order:
            total = merge(total, attend(scores[:, keys], v[keys]))
        assert total is not None
        torch.testing.assert_close(total.out, want.out, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(total.lse, want.lse, rtol=1e-13, atol=1e-13)


def test_an_empty_side_changes_nothing() -> None:
    part = attend(torch.randn(2, 3), torch.randn(3, 4))
    empty = Partial(torch.zeros(2, 1, 1, 4), torch.full((2, 1, 1), -inf))
    for a, b in ((part, empty), (empty, part)):
        total = merge(Partial(a.out.clone(), a.lse), b)
        assert total is not None
        assert torch.equal(total.out, part.out) and torch.equal(total.lse, part.lse)
    assert merge(None, part) is part and merge(part, None) is part and merge(None, None) is None


def test_nan_is_not_masked_by_a_merge() -> None:
    bad = Partial(torch.full((2, 1, 1, 4), torch.nan), torch.full((2, 1, 1), torch.nan))
    for other in (
        attend(torch.randn(2, 3), torch.randn(3, 4)),
        Partial(torch.zeros(2, 1, 1, 4), torch.full((2, 1, 1), -inf)),
    ):
        total = merge(Partial(other.out.clone(), other.lse), bad)
        assert total is not None and total.out.isnan().all() and total.lse.isnan().all()


def test_partials_in_half_precision_are_accumulated_in_float32() -> None:
    part = Partial(torch.ones(2, 1, 1, 4, dtype=torch.bfloat16), torch.zeros(2, 1, 1))
    total = merge(part, part)
    assert total is not None and total.out.dtype == torch.float32
    half = torch.ones(2, dtype=torch.float16)
    assert add(None, half) is half and add(half, half).dtype == torch.float32
    assert widened(None, half).dtype == torch.float32 and add(widened(None, half), half).tolist() == [1, 1]


def test_merging_some_rows_leaves_the_others_alone() -> None:
    q = torch.zeros(4, 1, 1, 2, dtype=torch.bfloat16)
    some = Partial(torch.ones(2, 1, 1, 3, dtype=torch.bfloat16), torch.ones(2, 1, 1))
    first = merge_rows(None, range(1, 4, 2), some, q)
    assert first.out[:, 0, 0, 0].tolist() == [0, 1, 0, 1] and first.lse[:, 0, 0].tolist() == [-inf, 1, -inf, 1]
    second = merge_rows(first, range(0, 2), Partial(some.out * 3, some.lse), q)
    assert second.out[:, 0, 0, 0].tolist() == [3, 2, 0, 1]
    torch.testing.assert_close(second.lse[1, 0, 0], torch.tensor(1.0 + torch.log(torch.tensor(2.0)).item()))
