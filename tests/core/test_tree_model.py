"""A small language model over a tree equals its sequences one by one: loss and all gradients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from method_cases import METHODS
from nightly import nightly
from torch import Tensor
from torch.nn.functional import cross_entropy

import cp_plugin
from cp_plugin import ContextParallel, Options, Problem, Tree
from cp_plugin.comm import Mesh, run_threads
from cp_plugin.methods import registry as providers

START = Path(__file__).parents[2] / "docs" / "start.md"
HEADS, WIDTH, WORDS = 8, 128, 32
ROLLOUTS = Tree((13, 9, 4, 7, 5, 0, 6, 30, 12, 10), (-1, 0, 1, 1, 0, 4, 4, -1, 7, 7))
"""Two prompts; two answers of the first continue in two ways, and one is empty."""


class Model(NamedTuple):
    """Embedding, attention with rotary positions, residual, head."""

    embedding: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    head: Tensor

    @classmethod
    def random(cls) -> Model:
        g = torch.Generator().manual_seed(0)
        shapes = ((WORDS, WIDTH), *[(WIDTH, WIDTH)] * 3, (WIDTH, WORDS))
        return cls(*(torch.randn(s, generator=g, dtype=torch.float64).div(8).requires_grad_() for s in shapes))

    def logits(
        self, cp: ContextParallel, tokens: Tensor, position_ids: Tensor, tree: Tree | None, heads: int
    ) -> Tensor:
        """Of this rank's tokens: ``[s, WORDS]``."""
        x = self.embedding[tokens]
        q, k, v = ((x @ w).view(len(x), 1, heads, -1) for w in (self.queries, self.keys, self.values))
        x = x + cp.attention(_rotated(q, position_ids), _rotated(k, position_ids), v, tree=tree).reshape(x.shape)
        return x @ self.head


def _rotated(x: Tensor, position_ids: Tensor) -> Tensor:
    angles = position_ids[:, None, None, None] * 100.0 ** -torch.linspace(0, 1, x.size(-1) // 2, dtype=x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def _words(tree: Tree) -> Tensor:
    return torch.randint(0, WORDS, (tree.seq_length,), generator=torch.Generator().manual_seed(1))


def one_by_one(tree: Tree, heads: int) -> list[Tensor]:
    """Loss over all sequences, each with its own prompt, and its gradients."""
    model, cp, total = Model.random(), ContextParallel("ring"), torch.zeros((), dtype=torch.float64)
    for leaf in tree.leaves:
        tokens = _words(tree)[tree.sequence(leaf)]
        logits = model.logits(cp, tokens, torch.arange(len(tokens)), None, heads)
        total = total + cross_entropy(logits[:-1], tokens[1:], reduction="sum")
    return [total.detach(), *torch.autograd.grad(total, model)]


def on_ranks(tree: Tree, provider: str, size: int, heads: int, **options: object) -> list[Tensor]:
    """The same from the tree, sharded over ranks and summed."""
    weights, words = tree.sequences_per_token(), _words(tree)
    resolved = providers.settle(provider, Problem(size=size, heads=heads, kv_heads=heads), Options(**options))

    def rank(mesh: Mesh) -> list[Tensor]:
        cp, model = ContextParallel(resolved, mesh=mesh), Model.random()
        logits = model.logits(cp, cp.shard(words), cp.shard(tree.position_ids()), tree, heads)
        rows, targets = tree.predictions(cp.positions(tree.seq_length))
        losses = cross_entropy(logits[rows], words[targets], reduction="none")
        loss = (losses * weights[targets]).sum()
        return [loss.detach(), *torch.autograd.grad(loss, model)]

    return [torch.stack(parts).sum(0) for parts in zip(*run_threads(rank, resolved.axes), strict=True)]


def check(tree: Tree, provider: str, size: int, heads: int, **options: object) -> None:
    for got, want in zip(on_ranks(tree, provider, size, heads, **options), one_by_one(tree, heads), strict=True):
        assert (got - want).norm() <= 1e-10 * want.norm()


@pytest.mark.parametrize(
    ("provider", "size", "layout"), [("needed", 4, "zigzag"), ("attention2d", 4, "striped"), ("ulysses", 2, "zigzag")]
)
def test_loss_and_gradients_are_those_of_the_sequences(provider: str, size: int, layout: str) -> None:
    check(ROLLOUTS, provider, size, HEADS, layout=layout)


def test_the_example_of_the_documentation() -> None:
    """``docs/start.md``: its loss counts each token once."""
    (example,) = (
        block for block in re.findall(r"```python\n(.*?)```", START.read_text(), re.DOTALL) if "tree=" in block
    )
    model, words = Model.random(), torch.randint(0, WORDS, (640,), generator=torch.Generator().manual_seed(2))

    def project(tokens: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ((model.embedding[tokens] @ w).view(len(tokens), 1, HEADS, -1) for w in model[1:4])
        return _rotated(q, position_ids), _rotated(k, position_ids), v

    def head(out: Tensor) -> Tensor:
        return out.flatten(1) @ model.head

    def rank(mesh: Mesh) -> dict[str, Any]:
        cp = ContextParallel("needed", mesh=mesh)
        names = {"cp_plugin": cp_plugin, "cp": cp, "tokens": words, "cross_entropy": cross_entropy}
        exec(example, names | (found := {"project": project, "head": head}), found)
        return found

    ranks = run_threads(rank, {"cp": 4})
    tree, one, want = ranks[0]["tree"], ContextParallel("ring"), torch.zeros((), dtype=torch.float64)
    for leaf, new in zip(tree.leaves, (0, 400, 0), strict=True):  # the second answer's prompt was counted
        tokens = words[tree.sequence(leaf)]
        logits = head(one.attention(*project(tokens, torch.arange(len(tokens)))))
        want += cross_entropy(logits[:-1], tokens[1:], reduction="none")[max(0, new - 1) :].sum()
    assert abs(sum(found["loss"] for found in ranks) - want) <= 1e-10 * want


LARGER = Tree([4 * n for n in ROLLOUTS.lengths], ROLLOUTS.parents)


@nightly
@pytest.mark.parametrize(("provider", "layout"), METHODS, ids=["-".join(m) for m in METHODS])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_every_method_on_up_to_64_ranks(provider: str, layout: str, size: int) -> None:
    heads = max(HEADS, size if provider == "ulysses" else 0)
    check(LARGER, provider, size, heads, layout=layout)
