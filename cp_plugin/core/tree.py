"""Trees: sequences that begin alike, packed once. A prompt with its answers, or a conversation that branches.

    prompt p, answers a and b      p p p a a b b b       lengths    3, 2, 3
    position_ids                   0 1 2 3 4 3 4 5       parents   -1, 0, 0

A token sees itself and what precedes it on its path from the root: an answer sees its prompt and itself, and not the
other answers. Nodes stand in depth-first order, so that the tokens that see a key are the ones right behind it, up to
the end of its subtree: one integer a node says all (``cp_plugin.core.mask.Mask``).

Source: answers that share a prompt's forward and backward are those of Prefix Grouper (arXiv 2506.05433), here at any
depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from cp_plugin.core.mask import Mask

ROOT = -1
"""As a parent: none."""


@dataclass(frozen=True)
class Tree:
    """Which sequences are packed, and what they share. Attention over it equals that over the sequences one by one."""

    lengths: Sequence[int]
    """Tokens of each node, in the order of the pack; a node may be empty."""
    parents: Sequence[int] = ()
    """The number of the node that each one continues, -1 for none. Left out: -1 for all, which is packed documents."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: for a length below 0, no tokens at all, a missing parent, or another order than depth-first.
        """
        lengths = tuple(map(int, self.lengths))
        parents = tuple(map(int, self.parents)) or (ROOT,) * len(lengths)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "parents", parents)
        if not any(lengths) or min(lengths) < 0:
            raise ValueError(f"the lengths of a tree's nodes must be 0 or more, and not all of them 0: got {lengths}")
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
        """Which tokens of the pack see which."""
        begins: list[int] = []
        stops: list[int] = []
        for begin, length, stop in zip(self._begins, self.lengths, self._stops, strict=True):
            if length and stops[-1:] != [stop]:  # else nobody sees it, or the same tokens as the node before it
                begins.append(begin)
                stops.append(stop)
        bounds = (*begins, self.seq_length)
        return Mask(right=0, documents=bounds, stops=() if bounds[1:] == tuple(stops) else tuple(stops))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The nodes that none continues: the last ones of the sequences."""
        continued = set(self.parents)
        return tuple(node for node in range(len(self.lengths)) if node not in continued)

    def sequence(self, node: int) -> Tensor:
        """Where the tokens from the root to the end of a node are in the pack: int64 ``[tokens]``, in their order."""
        path = []
        while node != ROOT:
            path.append(torch.arange(self._begins[node], self._begins[node] + self.lengths[node]))
            node = self.parents[node]
        return torch.cat(path[::-1])

    def position_ids(self) -> Tensor:
        """How many tokens precede each on its path, for rotary and learned positions: int64 ``[seq_length]``."""
        before: list[int] = []  # of each node's first token
        for parent in self.parents:
            before.append(0 if parent == ROOT else before[parent] + self.lengths[parent])
        ahead = [first - begin for first, begin in zip(before, self._begins, strict=True)]
        return torch.arange(self.seq_length) + self._of_tokens(ahead)

    def sequences_per_token(self) -> Tensor:
        """How many sequences each token is part of: int64 ``[seq_length]``.

        With these weights a sum over the tokens of the pack is the sum over the sequences one by one.
        """
        below = [0] * len(self.lengths)
        for leaf in self.leaves:
            below[leaf] = 1
        for node in reversed(range(len(self.lengths))):
            if self.parents[node] != ROOT:
                below[self.parents[node]] += below[node]
        return self._of_tokens(below)

    def predictions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens of the pack those of a shard predict. The end of a prompt predicts the start of every answer.

        Args:
            positions: int ``[s]``: where the tokens of the shard are in the pack (``ContextParallel.positions``).

        Returns:
            ``rows`` and ``targets``, int64 ``[predictions]``: the token in row ``rows[i]`` of the shard comes right
            before token ``targets[i]`` of the pack. Each token is a target on one rank, but the first ones of paths.
        """
        row_of = torch.full((self.seq_length + 1,), -1, device=positions.device)
        row_of[positions] = torch.arange(len(positions), device=positions.device)
        rows = row_of[self._predecessors.to(positions.device)]  # -1, for none, is the additional last one
        targets = (rows >= 0).nonzero().flatten()
        return rows[targets], targets

    @cached_property
    def _predecessors(self) -> Tensor:
        """The token before each on its path, -1 for none."""
        found = torch.arange(-1, self.seq_length - 1)
        last: list[int] = []  # token of each path
        for begin, length, parent in zip(self._begins, self.lengths, self.parents, strict=True):
            before = -1 if parent == ROOT else last[parent]
            last.append(begin + length - 1 if length else before)
            found[begin : begin + min(length, 1)] = before
        return found

    @cached_property
    def _begins(self) -> tuple[int, ...]:
        """Where each node begins in the pack."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    @property
    def _stops(self) -> list[int]:
        """Where the subtree of each node ends."""
        stops = [begin + length for begin, length in zip(self._begins, self.lengths, strict=True)]
        for node in reversed(range(len(stops))):
            if self.parents[node] != ROOT:
                stops[self.parents[node]] = max(stops[self.parents[node]], stops[node])
        return stops

    def _of_tokens(self, of_nodes: Sequence[int]) -> Tensor:
        """What a node has, for each of its tokens."""
        return torch.repeat_interleave(torch.tensor(of_nodes), torch.tensor(self.lengths))
