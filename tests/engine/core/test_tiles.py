"""Tiles of arbitrary affine segments against brute force over positions; work per rank of each layout."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import masks, positions, seen

from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.tiles import Tile, tiles

segment = st.builds(
    lambda start, length, step: range(start, start + length * step, step),
    st.integers(0, 30),
    st.integers(1, 9),
    st.sampled_from([1, 2, 3, 4, 6]),
)
shards = st.lists(segment, min_size=1, max_size=3).map(tuple)
TOKENS = 100


def pairs_of(tiles: tuple[Tile, ...]) -> list[tuple[int, int]]:
    return [(i, j) for t in tiles for m, i in enumerate(t.q) for n, j in enumerate(t.k) if n <= m + t.diagonal]


@given(shards, shards, masks(TOKENS))
@settings(max_examples=1000)
def test_tiles_cover_what_is_seen_exactly_once(q: Segments, k: Segments, mask: Mask) -> None:
    """Also once cut into full and square causal tiles; every row and key of a tile sees something."""
    cover = tiles(q, k, mask)
    covered = pairs_of(cover)
    assert len(covered) == len(set(covered)), "a pair is in two tiles"
    assert sorted(covered) == list(map(tuple, seen(mask, TOKENS)[positions(q)][:, positions(k)].nonzero().tolist()))
    assert sum(t.pairs for t in cover) == len(covered)
    for tile in cover:
        pairs, parts = sorted(pairs_of((tile,))), tile.cut()
        assert {i for i, _ in pairs} == set(tile.q) and {j for _, j in pairs} == set(tile.k)
        assert sorted(pairs_of(parts)) == pairs
        assert all(p.full or (p.diagonal == 0 and len(p.q) == len(p.k)) for p in parts)
