"""Who sees whom, without tiles: by the definition of a mask, and in a tree by walking to the root; random masks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st
from oracle import sees
from torch import Tensor

from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.placement.documents import get_layout


@st.composite
def trees(draw: st.DrawFn, tokens: int, nodes: int = 9) -> Tree:
    """So many tokens in at most so many nodes, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=nodes - 1)))
    lengths = [b - a for a, b in itertools.pairwise((0, *cuts, tokens))]
    parents: list[int] = []
    path: list[int] = []
    for node in range(len(lengths)):
        del path[draw(st.integers(0, len(path))) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return Tree(lengths, parents)


def paths(tree: Tree) -> list[list[int]]:
    """For each token of the pack those before it on its path and itself, from the root."""
    begins = [0, *itertools.accumulate(tree.lengths)]
    walked: list[list[int]] = []
    for node, length in enumerate(tree.lengths):
        above: list[int] = []
        parent = tree.parents[node]
        while parent != -1:
            above = [*range(begins[parent], begins[parent] + tree.lengths[parent]), *above]
            parent = tree.parents[parent]
        walked += [[*above, *range(begins[node], begins[node] + n + 1)] for n in range(length)]
    return walked


def visible(tree: Tree) -> Tensor:
    """bool ``[query, key]``, by ``paths``."""
    seen = torch.zeros(tree.seq_length, tree.seq_length, dtype=torch.bool)
    for token, path in enumerate(paths(tree)):
        seen[token, path] = True
    return seen


def seen(mask: Mask, tokens: int) -> Tensor:
    """bool ``[query, key]``, by the definition of a mask."""
    at = torch.arange(tokens)
    return sees(at, at, mask.left, mask.right, mask.documents, mask.stops)


def held(layout: str, *ranks: int, tokens: int = 48, size: int = 4) -> Segments:
    """What these ranks hold of so many tokens, one after the other."""
    return tuple(s for rank in ranks for s in get_layout(layout).segments(tokens, size, rank))


def positions(segments: Segments) -> Tensor:
    return torch.tensor([p for s in segments for p in s], dtype=torch.int64)


def flat_masks(tokens: int) -> st.SearchStrategy[Mask]:
    """Windows and documents."""
    bound = st.none() | st.integers(0, 40)
    inner = st.lists(st.integers(1, tokens - 1), max_size=7)
    bounds = inner.map(lambda inner: (0, *sorted(set(inner)), tokens)) | st.just(())
    return st.builds(Mask, bound, bound | st.just(0), bounds, st.just(()))


def masks(tokens: int) -> st.SearchStrategy[Mask]:
    return flat_masks(tokens) | trees(tokens).map(lambda tree: tree.mask)
