"""Gradient sums over rows, and one row term per query block."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from cp_plugin.core.block import Block, Scores
from cp_plugin.core.mask import CAUSAL
from cp_plugin.core.values import KeyValues, Queries, Sums
from cp_plugin.kernels.backends.reference import Reference
from cp_plugin.kernels.backends.sdpa import Sdpa
from cp_plugin.kernels.blocks import RowTerms, Tiled
from cp_plugin.kernels.merge import add_rows
from cp_plugin.methods.local import Local
from cp_plugin.placement.documents import get_layout
from cp_plugin.planner.trace.memory import Meter


class Counted(Sdpa):
    """Counts how often a row term is made."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "made", [])

    __slots__ = ("made",)

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        self.made.append(dout.shape)
        return Sdpa.row_term(self, dout, delta)


def test_row_term_is_cached_while_its_block_lives() -> None:
    backend, terms = Counted(), RowTerms()
    dout, delta = torch.randn(4, 1, 2, 8), torch.randn(4, 1, 2)
    first = terms.of(dout, delta, backend)
    assert terms.of(dout, delta, backend) is first and len(backend.made) == 1
    dout.mul_(2)
    assert torch.allclose(terms.of(dout, delta, backend), Sdpa().row_term(dout, delta)), "of what is there now"
    assert len(backend.made) == 2
    other = delta + 1
    assert not torch.equal(terms.of(dout, other, backend), first) and len(backend.made) == 3
    terms.of(dout, other, backend)
    del dout
    gc.collect()
    assert not terms._terms, "memory goes with the block"


def test_positions_of_another_length_are_refused() -> None:
    segments = lambda at: (range(8),)  # noqa: E731
    local = Local(kernel=Tiled(Reference()), segments=segments, keys=segments, mask=CAUSAL, scores=Scores(1.0))
    q, k, v = torch.randn(3, 6, 1, 2, 4)
    with pytest.raises(AssertionError, match=r"\(8, 8\) positions of queries and keys for \(6, 6\) tokens"):
        local.forward(Queries(q), KeyValues(k, v))


@pytest.mark.parametrize("rows", [range(3, 8), range(0, 5), range(2, 6), range(0, 8, 2), range(7, 2, -1), range(0, 8)])
def test_add_rows(rows: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda x, **named: torch.full_like(x, torch.nan, **named))
    like, part = torch.randn(8, 1, 2, 4, dtype=torch.bfloat16), torch.randn(len(rows), 1, 2, 4).bfloat16()
    wanted = torch.zeros(8, 1, 2, 4)
    wanted[list(rows)] = part.float()
    first = add_rows(None, rows, part, like)
    assert torch.equal(first.float(), wanted)
    both = add_rows(first, rows, part, like)
    assert torch.equal(both.float(), 2 * wanted)


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
    kernel.row_terms.of(dout, delta, kernel.backend)
    with Meter() as meter:
        grads = kernel.backward(Queries(q, dout, lse, delta), KeyValues(k, v), block, Sums(dq=so_far))
    assert grads.dq is so_far and torch.equal(so_far, wanted)
    (tile,) = kernel.tiles(block)
    assert len(tile.q) == tokens // 2, "not all rows"
    parts = sum(2 * 2 * 16 * n for n in (len(tile.q), len(tile.k), len(tile.k)))  # heads, bytes, head size
    assert meter.peak < 2 * parts + 4 * q.numel(), "the tile's gradients, and no sum of all rows for dq"
