"""Random trees, and the tokens visible to each token by walking to the root."""

from __future__ import annotations

import itertools

import torch
from hypothesis import strategies as st
from torch import Tensor

from cp_plugin.core.tree import Tree


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
    found: list[list[int]] = []
    for node, length in enumerate(tree.lengths):
        above: list[int] = []
        parent = tree.parents[node]
        while parent != -1:
            above = [*range(begins[parent], begins[parent] + tree.lengths[parent]), *above]
            parent = tree.parents[parent]
        found += [[*above, *range(begins[node], begins[node] + n + 1)] for n in range(length)]
    return found


def visible(tree: Tree) -> Tensor:
    """bool ``[query, key]``."""
    seen = torch.zeros(tree.seq_length, tree.seq_length, dtype=torch.bool)
    for token, path in enumerate(paths(tree)):
        seen[token, path] = True
    return seen
