"""Trees against a walk to the root: masks, positions and predictions."""

from __future__ import annotations

import re
from bisect import bisect
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_cases import paths, positions, seen, trees, visible
from torch import Tensor
from torch.nn.functional import cross_entropy

import cp_plugin
from cp_plugin import ContextParallel
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.tiles import tiles
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.placement.documents import get_layout

START = Path(__file__).parents[3] / "docs" / "start.md"
TOKENS = 48
"""Divisible over 1, 2, 3, 4, 6 and 8 ranks in every layout."""


@given(trees(TOKENS))
@settings(max_examples=100)
def test_the_mask_of_a_tree(tree: Tree) -> None:
    """Tiles and needs of such masks: ``test_tiles`` and ``test_needs``."""
    assert torch.equal(seen(tree.mask, TOKENS), visible(tree))


@given(trees(TOKENS), st.integers(1, 8))
@settings(max_examples=60)
def test_paths_positions_and_predictions(tree: Tree, size: int) -> None:
    walked = paths(tree)
    assert tree.position_ids().tolist() == [len(path) - 1 for path in walked]
    for node in range(len(tree.lengths)):
        end = sum(tree.lengths[: node + 1])
        if tree.lengths[node]:
            assert tree.sequence(node).tolist() == walked[end - 1]
    held = torch.cat([tree.sequence(leaf) for leaf in tree.leaves])
    assert torch.equal(tree.sequences_per_token(), held.bincount(minlength=TOKENS))
    predicted = []
    for rank in range(size):
        own = torch.arange(rank, TOKENS, size)
        rows, targets = tree.predictions(own)
        predicted += list(zip(own[rows].tolist(), targets.tolist(), strict=True))
    assert sorted(predicted) == sorted((path[-2], path[-1]) for path in walked if len(path) > 1)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_one_tile_per_prompt_and_answer(layout: str) -> None:
    """The answers see their prompt in one tile, not in one each."""
    tree = Tree([12] + [3] * 12, [-1] + [0] * 12)
    for rank in range(2):
        held = get_layout(layout).segments(TOKENS, 2, rank)
        nodes = {bisect(tree.mask.documents, at) for at in positions(held).tolist()}
        assert len(tiles(held, held, tree.mask)) == len(nodes)


def test_roots_and_chains_are_packed_documents() -> None:
    assert Tree(torch.tensor([3, 0, 5])).mask == Tree((3, 0, 5)).mask == Mask(right=0, documents=(0, 3, 8))
    assert Tree((3, 0, 5), (-1, 0, 1)).mask == Mask(right=0, documents=(0, 8))
    assert Tree((3, 2, 5, 4), (-1, 0, 0, 2)).mask == Mask(right=0, documents=(0, 3, 5, 14), stops=(14, 5, 14))


@pytest.mark.parametrize(
    ("lengths", "parents", "why"),
    [
        ((), (), "not all 0"),
        ((0, 0), (-1, 0), "not all 0"),
        ((4, -1), (-1, 0), "not all 0"),
        ((4, 4), (-1,), "2 nodes needs 2 parents, not 1"),
        ((4, 4, 4), (-1, -1, 0), "node 2 cannot continue node 0"),
        ((4, 4), (-1, 1), "node 1 cannot continue node 1"),
        ((4, 4), (-1, -2), "node 1 cannot continue node -2"),
    ],
)
def test_invalid_trees_are_refused(lengths: tuple, parents: tuple, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Tree(lengths, parents)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"window": (3, 0)}, "tree cannot be combined with a window"),
        ({"causal": False}, "tree needs causal=True"),
        ({"cu_seqlens": torch.tensor([0, 4, 8])}, "tree cannot be combined with cu_seqlens"),
        ({"tree": Tree((4, 5), (-1, 0))}, "the tree has 9 tokens, but all ranks together have 8"),
    ],
)
def test_unsupported_combinations_are_refused(changes: dict, why: str) -> None:
    q = torch.zeros(8, 1, 1, 4)
    tree = Tree((4, 4), (-1, 0))
    with pytest.raises(ValueError, match=why):
        ContextParallel("ring").attention(q, q, q, **{"tree": tree} | changes)
    with pytest.raises(TypeError, match="'tree'"):
        ContextParallel("lasp2").linear_attention(q, q, q, tree=tree)  # type: ignore[call-arg]


def test_the_example_of_the_documentation() -> None:
    """``docs/start.md``: a small language model's loss counts each token once, as its sequences one by one do."""
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", START.read_text(), re.DOTALL) if "tree=" in block
    )
    g, heads, width = torch.Generator().manual_seed(2), 8, 128
    words = torch.randint(0, 32, (640,), generator=g)
    embedding, places, *weights, last = (
        torch.randn(shape, generator=g, dtype=torch.float64) / 8
        for shape in ((32, width), (640, width), *[(width, width)] * 3, (width, 32))
    )

    def project(tokens: Tensor, position_ids: Tensor) -> list[Tensor]:
        x = embedding[tokens] + places[position_ids]
        return [(x @ w).view(len(tokens), 1, heads, -1) for w in weights]

    def head(out: Tensor) -> Tensor:
        return out.flatten(1) @ last

    def rank(mesh: Mesh) -> dict[str, Any]:
        cp = ContextParallel("needed", mesh=mesh)
        names = {"cp_plugin": cp_plugin, "cp": cp, "tokens": words, "cross_entropy": cross_entropy}
        exec(example, names | (defined := {"project": project, "head": head}), defined)
        return defined

    ranks = run_threads(rank, {"cp": 4})
    tree, one, want = ranks[0]["tree"], ContextParallel("ring"), torch.zeros((), dtype=torch.float64)
    for leaf, new in zip(tree.leaves, (0, 400, 0), strict=True):  # the second answer's prompt was counted
        tokens = words[tree.sequence(leaf)]
        logits = head(one.attention(*project(tokens, torch.arange(len(tokens)))))
        want += cross_entropy(logits[:-1], tokens[1:], reduction="none")[max(0, new - 1) :].sum()
    assert abs(sum(values["loss"] for values in ranks) - want) <= 1e-10 * want
