"""Block attention: kernel choice, token sorting, and equality of all paths."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from mask_cases import held, positions, seen
from torch import Tensor

from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import CAUSAL, Mask
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import tiles
from cp_plugin.engine.core.tree import Tree
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.kernels.backends.reference import _probabilities, attend
from cp_plugin.engine.kernels.backends.sdpa import Sdpa
from cp_plugin.engine.kernels.blocks import Either, InOrder, Tiled, Whole, kernel
from cp_plugin.engine.kernels.merge import add_sums, merge


@dataclass
class ByPositions:
    """A naive ``BlockBackend`` that records the number of runs in each call."""

    name: str = "positions"
    runs: list[tuple[int, int]] = field(default_factory=list)

    def unsupported(self, *_: object) -> None:
        return None

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial:
        assert not block.mask.stops, "kernels know documents, not trees"
        self.runs.append((len(block.rows), len(block.keys)))
        merged = merge(onto, _attention(queries.q, *kv.tensors, block))
        assert merged is not None
        return merged

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients:
        (q, dout, lse, delta), (k, v), scale = queries.tensors, kv.tensors, block.scores.scale
        self.runs.append((len(block.rows), len(block.keys)))
        scores = (torch.einsum("qbhd,kbhd->bhqk", q, k) * scale).masked_fill(~_seen(*block.area), -torch.inf)
        p = _probabilities(scores, lse.permute(1, 2, 0).unsqueeze(-1))
        dp = torch.einsum("qbhe,kbhe->bhqk", dout, v)
        ds = p * (dp - delta.permute(1, 2, 0).unsqueeze(-1)) * scale
        dq, dk = torch.einsum("bhqk,kbhd->qbhd", ds, k), torch.einsum("bhqk,qbhd->kbhd", ds, q)
        return add_sums(onto, Gradients(dq, dk, torch.einsum("bhqk,qbhe->kbhe", p, dout)))


def _seen(rows: Segments, keys: Segments, mask: Mask) -> Tensor:
    return seen(mask, 48)[positions(rows)][:, positions(keys)]


def _attention(q: Tensor, k: Tensor, v: Tensor, block: Block) -> Partial:
    return Partial(*attend(q, k, v, ~_seen(*block.area), block.scores))


TREE = Tree((9, 5, 4, 1, 6, 8, 2, 13), (-1, 0, 1, 1, 0, 0, -1, 6)).mask
BLOCKS = {
    "a shard with itself": (Block(held("contiguous", 1), held("contiguous", 1), CAUSAL), "library"),
    "all keys seen": (Block(held("zigzag", 0), held("zigzag", 2), Mask()), "library"),
    "zigzag, later queries": (Block(held("zigzag", 0), held("zigzag", 2), CAUSAL), "library"),
    "striped, strictly causal": (Block(held("striped", 0), held("striped", 3), CAUSAL), "library"),
    "gathered, one run in order": (Block(held("striped", 0, 2), held("striped", 1, 3), CAUSAL), "library"),
    "staircase": (Block(held("striped", 0, 1, 2, 3), held("striped", 1, 3), CAUSAL), "own"),
    "zigzag, gathered": (Block(held("zigzag", 0, 3), held("zigzag", 1, 3), CAUSAL), "own"),
    "window": (Block(held("contiguous", 1), held("contiguous", 1), Mask(left=5, right=0)), "own"),
    "documents": (Block(held("striped", 1), held("striped", 1), Mask(right=0, documents=(0, 7, 48))), "own"),
    "a tree": (Block(held("zigzag", 0, 3), held("zigzag", 1, 0), TREE), "own"),
    "a tree, keys of few depths": (Block(held("contiguous", 3), held("contiguous", 2), TREE), "own"),
}

SCORES = Scores(0.3)


def tensors(block: Block) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    s, t = (sum(map(len, side)) for side in (block.rows, block.keys))
    return tuple(torch.randn(n, 1, 2, 8, generator=g, dtype=torch.float64) for n in (s, t, t, s))


@pytest.mark.parametrize(("block", "goes_to"), BLOCKS.values(), ids=BLOCKS)
def test_kernel_choice_and_agreement_of_all_paths(block: Block, goes_to: str) -> None:
    block = block._replace(scores=SCORES)
    q, k, v, dout = tensors(block)
    own, tiled = ByPositions(), Tiled(Sdpa())
    either = Either(tiled, InOrder(Whole(own), enough=3))
    ways = (either, InOrder(tiled), InOrder(Whole(ByPositions())), Whole(ByPositions()))
    want = _attention(q, k, v, block)
    for way in ways:
        part = way.forward(Queries(q), KeyValues(k, v), block)
        assert part is not None
        torch.testing.assert_close(part.out, want.out)
        torch.testing.assert_close(part.lse, want.lse)
    assert bool(own.runs) == (goes_to == "own")
    queries = Queries(q, dout, want.lse, (dout * want.out).sum(-1))
    grads = [way.backward(queries, KeyValues(k, v), block) for way in ways]
    for other in grads[1:]:
        torch.testing.assert_close(tuple(other), tuple(grads[0]))


@pytest.mark.parametrize("name", ["library", "own"])
def test_running_partials_with_sorted_tokens(name: str) -> None:
    rows, first, second = held("striped", 0, 1, 2, 3), held("striped", 0, 2), held("striped", 1, 3)
    way = InOrder(Tiled(Sdpa())) if name == "library" else InOrder(Whole(ByPositions()))
    q, k, v, _ = tensors(Block(rows, first, CAUSAL))
    k2, v2 = k.flip(0), v * 2
    both = Block(rows, (*first, *second), CAUSAL, SCORES)
    want = _attention(q, torch.cat([k, k2]), torch.cat([v, v2]), both)
    onto = way.forward(Queries(q), KeyValues(k, v), Block(rows, first, CAUSAL, SCORES))
    merged = way.forward(Queries(q), KeyValues(k2, v2), Block(rows, second, CAUSAL, SCORES), onto)
    assert merged is not None
    torch.testing.assert_close(tuple(merged), tuple(want))


def test_own_kernels_sort_short_runs_only() -> None:
    block = Block(held("striped", 0, 2), held("striped", 1, 3), CAUSAL)
    for enough, runs in ((12, (2, 2)), (13, (1, 1)), (None, (1, 1))):
        own = ByPositions()
        q, k, v, _ = tensors(block)
        InOrder(Whole(own), enough=enough).forward(Queries(q), KeyValues(k, v), block)
        assert own.runs == [runs]


def test_disjoint_blocks_are_skipped() -> None:
    own, later = ByPositions(), Block(held("contiguous", 0), held("contiguous", 1), CAUSAL)
    q, k, v, dout = tensors(later)
    onto = Partial(q, q[..., 0])
    assert Whole(own).forward(Queries(q), KeyValues(k, v), later) is None
    assert Whole(own).forward(Queries(q), KeyValues(k, v), later, onto) is onto
    assert Whole(own).backward(Queries(q, dout, q[..., 0], q[..., 0]), KeyValues(k, v), later) is None
    assert not own.runs and not tiles(*later.area)


def test_kernels_on_the_cpu() -> None:
    problem, cpu = Problem(size=1), torch.device("cpu")
    chosen = kernel(backends.get("sdpa"), problem, cpu, auto=True)
    assert chosen == InOrder(Tiled(Sdpa()))
    assert isinstance(kernel(backends.get("triton"), problem, cpu, auto=False).inner, Whole)
