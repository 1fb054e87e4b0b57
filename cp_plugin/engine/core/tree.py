"""Trees of sequences with shared prefixes: a prompt with its answers, or a branching conversation, packed once.

    prompt p, answers a and b      p p p a a b b b       lengths    3, 2, 3
    position_ids                   0 1 2 3 4 3 4 5       parents   -1, 0, 0

A token sees itself and its predecessors on the path from the root: an answer sees its prompt and itself, not the other
answers. Nodes are in depth-first order, so a key is visible to the tokens right behind it up to the end of its subtree:
one integer per node (``engine.core.mask.Mask``).

Source: Prefix Grouper (arXiv 2506.05433) for prompts with answers; here at any depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from cp_plugin.engine.core.mask import Mask

ROOT = -1
"""Parent of a root node."""


@dataclass(frozen=True)
class Tree:
    """A packed tree of sequences. Attention over it equals attention over its sequences one by one."""

    lengths: Sequence[int]
    """Tokens of each node in pack order; a node may be empty."""
    parents: Sequence[int] = ()
    """The node that each node continues, -1 for a root. Omitted: all roots, that is, packed documents."""

    def __post_init__(self) -> None:
        """ValueError for a negative length, no tokens at all, a missing parent, or an order other than depth-first."""
        lengths = tuple(map(int, self.lengths))
        parents = tuple(map(int, self.parents)) or (ROOT,) * len(lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "parents", parents)
        if not any(lengths) or min(lengths) < 0:
            raise ValueError(f"a tree's node lengths must be 0 or more, and not all 0: got {lengths}")
        if len(parents) != len(lengths):
            raise ValueError(f"a tree of {len(lengths)} nodes needs {len(lengths)} parents, not {len(parents)}")
        path: list[int] = []
        for node, parent in enumerate(parents):
            while path and path[-1] != parent:
                path.pop()
            if not path and parent != ROOT:
                raise ValueError(
                    f"node {node} cannot continue node {parent}: nodes must be in depth-first order, where a node "
                    "continues the one before it, an ancestor of that one, or none (-1)"
                )
            path.append(node)

    @property
    def seq_length(self) -> int:
        """Tokens of the pack."""
        return sum(self.lengths)

    @cached_property
    def mask(self) -> Mask:
        """The attention mask of the pack."""
        begins: list[int] = []
        stops: list[int] = []
        for begin, length, stop in zip(self._begins, self.lengths, self._stops, strict=True):
            if length and stops[-1:] != [stop]:  # skip empty nodes, and merge a node into the one it continues
                begins.append(begin)
                stops.append(stop)
        bounds = (*begins, self.seq_length)
        return Mask(right=0, documents=bounds, stops=() if bounds[1:] == tuple(stops) else tuple(stops))

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without a continuation: the last ones of the sequences."""
        continued = set(self.parents)
        return tuple(node for node in range(len(self.lengths)) if node not in continued)

    def sequence(self, node: int) -> Tensor:
        """Pack positions of the tokens from the root to the end of a node: int64 ``[tokens]``."""
        path = []
        while node != ROOT:
            path.append(torch.arange(self._begins[node], self._begins[node] + self.lengths[node]))
            node = self.parents[node]
        return torch.cat(path[::-1])

    def position_ids(self) -> Tensor:
        """Depth of each token on its path, for rotary and learned positions: int64 ``[seq_length]``."""
        before: list[int] = []  # of each node's first token
        for parent in self.parents:
            before.append(0 if parent == ROOT else before[parent] + self.lengths[parent])
        ahead = [first - begin for first, begin in zip(before, self._begins, strict=True)]
        return torch.arange(self.seq_length) + self._spread_to_tokens(ahead)

    def sequences_per_token(self) -> Tensor:
        """Number of sequences that contain each token: int64 ``[seq_length]``.

        As loss weights they make the sum over the pack equal the sum over the sequences one by one.
        """
        below = [0] * len(self.lengths)
        for leaf in self.leaves:
            below[leaf] = 1
        for node in reversed(range(len(self.lengths))):
            if self.parents[node] != ROOT:
                below[self.parents[node]] += below[node]
        return self._spread_to_tokens(below)

    def predictions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Next-token targets of a shard. The end of a prompt predicts the start of every answer.

        Args:
            positions: int ``[s]``: pack positions of the shard's tokens (``ContextParallel.positions``).

        Returns:
            ``rows`` and ``targets``, int64 ``[predictions]``: row ``rows[i]`` of the shard directly precedes token
            ``targets[i]`` of the pack. Every token but the first of each path is a target on exactly one rank.
        """
        row_of = torch.full((self.seq_length + 1,), -1, device=positions.device)
        row_of[positions] = torch.arange(len(positions), device=positions.device)
        rows = row_of[self._predecessors.to(positions.device)]  # index -1 (none) hits the extra last entry
        targets = (rows >= 0).nonzero().flatten()
        return rows[targets], targets

    @cached_property
    def _predecessors(self) -> Tensor:
        """The preceding token of each token on its path, -1 for none."""
        previous = torch.arange(-1, self.seq_length - 1)
        last: list[int] = []  # token of each path
        for begin, length, parent in zip(self._begins, self.lengths, self.parents, strict=True):
            before = -1 if parent == ROOT else last[parent]
            last.append(begin + length - 1 if length else before)
            previous[begin : begin + min(length, 1)] = before
        return previous

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """Start of each node in the pack."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @property
    def _stops(self) -> list[int]:
        """End of each node's subtree."""
        stops = [begin + length for begin, length in zip(self._begins, self.lengths, strict=True)]
        for node in reversed(range(len(stops))):
            if self.parents[node] != ROOT:
                stops[self.parents[node]] = max(stops[self.parents[node]], stops[node])
        return stops

    def _spread_to_tokens(self, of_nodes: Sequence[int]) -> Tensor:
        """Repeat per-node values for each token."""
        return torch.repeat_interleave(torch.tensor(of_nodes), torch.tensor(self.lengths))
