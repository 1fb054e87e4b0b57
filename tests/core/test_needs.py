"""Needed keys against brute force; ``needed`` sends exactly these."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import masks, positions, seen

from cp_plugin import ContextParallel
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.core.layout import Segments
from cp_plugin.core.mask import Mask
from cp_plugin.core.needs import needs, rows_of
from cp_plugin.core.tree import Tree
from cp_plugin.placement.documents import get_layout
from cp_plugin.testing.traffic import by_phase_and_axis

TOKENS, RANKS = 96, 4
BOUNDS = (0, 5, 6, 40, 41, 77, 96)


@st.composite
def divided(draw: st.DrawFn) -> list[Segments]:
    """All positions, in runs of random lengths or as every n-th, distributed over ranks."""
    ranks = draw(st.integers(1, 5))
    if draw(st.booleans()):
        return [(range(rank, TOKENS, ranks),) for rank in draw(st.permutations(range(ranks)))]
    cuts = sorted({0, TOKENS, *draw(st.lists(st.integers(1, TOKENS - 1), max_size=9))})
    runs = [range(a, b) for a, b in pairwise(cuts)]
    owners = [draw(st.integers(0, ranks - 1)) for _ in runs]
    return [tuple(run for run, owner in zip(runs, owners, strict=True) if owner == rank) for rank in range(ranks)]


@given(divided(), masks(TOKENS), st.data())
@settings(max_examples=200)
def test_needs_against_brute_force(keys: list[Segments], mask: Mask, data: st.DataObject) -> None:
    queries = data.draw(st.just(keys) | divided().filter(lambda other: len(other) == len(keys)))
    found, sees = needs(queries, keys, mask), seen(mask, TOKENS)
    for reader, rows in enumerate(queries):
        for owner, held in enumerate(keys):
            want = sees[positions(rows)][:, positions(held)].any(0).nonzero().flatten().tolist()
            got = found.rows(reader, owner)
            assert [row for run in got for row in run] == want
            assert len(got) == len(list(groupby(enumerate(want), key=lambda at: at[1] - at[0]))), "runs that touch"
            assert found.counts(len(keys))[reader, owner] == len(want)
            assert torch.equal(positions(rows_of(held, got)), positions(held)[want])


MASKS = {
    "causal": Mask(right=0),
    "full": Mask(),
    "window": Mask(left=7, right=0),
    "window of one": Mask(left=1, right=0),
    "both sides": Mask(left=3, right=9),
    "documents": Mask(right=0, documents=BOUNDS),
    "documents in a window": Mask(left=10, right=0, documents=BOUNDS),
    "a tree": Tree((15, 8, 4, 6, 6, 6, 30, 12, 9), (-1, 0, 1, 1, 0, 4, -1, 6, 6)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_only_what_is_seen_travels(mask: Mask | Tree, layout: str) -> None:
    """Every key row seen by another rank travels there once, and its gradients come back once."""
    batch, kv_heads, d, e = 2, 2, 8, 4
    held = [get_layout(layout).positions(TOKENS, RANKS, rank) for rank in range(RANKS)]
    if isinstance(mask, Tree):
        sees, call = seen(mask.mask, TOKENS), {"tree": mask}
    else:
        sees = seen(mask, TOKENS)
        window = (-1 if mask.left is None else mask.left, -1 if mask.right is None else mask.right)
        documents = torch.tensor(mask.documents, dtype=torch.int32) if mask.packed else None
        call = {"causal": mask.right == 0, "window": window, "cu_seqlens": documents}
    rows = torch.tensor([[int(sees[q][:, k].any(0).sum()) if q is not k else 0 for k in held] for q in held])

    def rank(mesh: Mesh) -> dict[tuple[str, str], int]:
        cp = ContextParallel("needed", mesh=mesh, layout=layout)
        q, k, v = (
            torch.zeros(TOKENS // RANKS, batch, heads, size, dtype=torch.bfloat16, requires_grad=True)
            for heads, size in ((4, d), (kv_heads, d), (kv_heads, e))
        )
        cp.attention(q, k, v, **call).sum().backward()
        return {line: nbytes for line, nbytes in by_phase_and_axis(mesh).items() if nbytes}

    width = batch * kv_heads * (d + e)
    for index, sent in enumerate(run_threads(rank, {"cp": RANKS})):
        forward = int(rows[:, index].sum()) * width * 2
        want = {("forward", "cp"): forward, ("backward", "cp"): forward + int(rows[index].sum()) * width * 4}
        assert sent == {line: nbytes for line, nbytes in want.items() if nbytes}, index
