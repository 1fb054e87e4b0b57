"""Needed keys against brute force. That ``needed`` sends these alone: ``ci/perf/exact.json``."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import masks, positions, seen

from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.needs import needs, rows_of

TOKENS = 96


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
    runs, sees = needs(queries, keys, mask), seen(mask, TOKENS)
    for reader, rows in enumerate(queries):
        for owner, held in enumerate(keys):
            want = sees[positions(rows)][:, positions(held)].any(0).nonzero().flatten().tolist()
            got = runs.rows(reader, owner)
            assert [row for run in got for row in run] == want
            assert len(got) == len(list(groupby(enumerate(want), key=lambda at: at[1] - at[0]))), "runs that touch"
            assert runs.counts(len(keys))[reader, owner] == len(want)
            assert torch.equal(positions(rows_of(held, got)), positions(held)[want])
