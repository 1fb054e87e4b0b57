"""Merging partial attention (exact, in any order, with empty rows and NaN), gradient sums over rows, and row terms."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.mask import CAUSAL
from cp_plugin.engine.core.values import KeyValues, Partial, Queries, Sums
from cp_plugin.engine.kernels.backends.reference import Reference
from cp_plugin.engine.kernels.backends.sdpa import Sdpa
from cp_plugin.engine.kernels.blocks import RowTerms, Tiled
from cp_plugin.engine.kernels.merge import add, merge, widened
from cp_plugin.engine.methods.local import Local
from cp_plugin.engine.placement.documents import get_layout
from cp_plugin.planner.trace.memory import Meter

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


def test_row_term_is_cached_while_its_block_lives() -> None:
    made, terms = [], RowTerms()
    backend = SimpleNamespace(row_term=lambda *tensors: made.append(1) or Sdpa().row_term(*tensors))
    dout, delta = torch.randn(4, 1, 2, 8), torch.randn(4, 1, 2)
    first = terms.get(dout, delta, backend)
    assert terms.get(dout, delta, backend) is first and len(made) == 1
    dout.mul_(2)
    assert torch.allclose(terms.get(dout, delta, backend), Sdpa().row_term(dout, delta)), "of what is there now"
    assert len(made) == 2
    other = delta + 1
    assert not torch.equal(terms.get(dout, other, backend), first) and len(made) == 3
    terms.get(dout, other, backend)
    del dout
    gc.collect()
    assert not terms._terms, "memory goes with the block"


def test_positions_of_another_length_are_refused() -> None:
    segments = lambda at: (range(8),)  # noqa: E731
    local = Local(kernel=Tiled(Reference()), segments=segments, keys=segments, mask=CAUSAL, scores=Scores(1.0))
    q, k, v = torch.randn(3, 6, 1, 2, 4)
    with pytest.raises(AssertionError, match=r"\(8, 8\) positions of queries and keys for \(6, 6\) tokens"):
        local.forward(Queries(q), KeyValues(k, v))


def test_partial_tiles_allocate_no_full_gradient() -> None:
    """A zigzag tile of half the queries is added to those rows of the sum; no second full sum exists."""
    tokens, kernel = 64, Tiled(Sdpa())
    layout = get_layout("zigzag")
    block = Block(layout.segments(2 * tokens, 2, 0), layout.segments(2 * tokens, 2, 1), CAUSAL, Scores(0.3))
    q, k, v, dout = torch.randn(4, tokens, 1, 2, 16).bfloat16()
    out, lse = kernel.forward(Queries(q), KeyValues(k, v), block)
    delta = (dout.float() * out.float()).sum(-1)
    so_far = torch.randn(q.shape)
    alone = kernel.backward(Queries(q, dout, lse, delta), KeyValues(k, v), block)
    wanted = so_far + alone.dq.float()
    kernel.row_terms.get(dout, delta, kernel.backend)
    with Meter() as meter:
        grads = kernel.backward(Queries(q, dout, lse, delta), KeyValues(k, v), block, Sums(dq=so_far))
    assert grads.dq is so_far and torch.equal(so_far, wanted)
    (tile,) = kernel.tiles(block)
    assert len(tile.q) == tokens // 2, "not all rows"
    parts = sum(2 * 2 * 16 * n for n in (len(tile.q), len(tile.k), len(tile.k)))  # heads, bytes, head size
    assert meter.peak < 2 * parts + 4 * q.numel(), "the tile's gradients, and no sum of all rows for dq"
