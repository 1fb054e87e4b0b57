"""Slots of a sharded KV cache: which rank holds which tokens of a batch of sequences.

A prompt's keys and values stay where prefill computes them, in the provider's layout. Each decoded token goes to the
rank that holds the fewest of its sequence. Two ranks, a prompt of 6 in the striped layout, then three tokens:

    rank 0:  0 2 4 | 6 8              slots are rows of the cache; a rank's positions increase
    rank 1:  1 3 5 | 7

Prompts are padded at the end to one length; slots of padding are reused by the tokens that follow. All ranks keep the
same books, so nothing has to be agreed upon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import steps_to

NOWHERE = 2**31 - 1
"""Position of an empty slot: behind every query, so that a causal mask hides it."""


class CacheFullError(ValueError):
    """A context is longer than the cache."""


def slots_for(tokens: int, size: int, multiple: int = 1) -> int:
    """Slots that each of ``size`` ranks needs for ``tokens`` tokens, rounded up to a multiple."""
    return -(-tokens // (size * multiple)) * multiple


class Chunk(NamedTuple):
    """The next tokens of each prompt, sharded in a layout."""

    first: int
    """This rank's first slot."""
    stop: int
    """One past its last slot."""
    positions: Tensor
    """Of this rank's tokens: int64 ``[tokens]``, on the CPU."""
    rows: tuple[Segments, ...]
    """Positions of every rank's tokens."""
    keys: tuple[Segments, ...]
    """Positions of every rank's slots, these included."""


class Dealt(NamedTuple):
    """The next tokens of each sequence, known to all ranks, and which of them this rank keeps."""

    positions: Tensor
    """int32 ``[tokens, batch]``."""
    tokens: Tensor
    """int64 ``[n]``: rows of ``positions`` kept here, their columns and their slots."""
    sequences: Tensor
    slots: Tensor
    used: int
    """Slots of this rank that hold a token of any sequence."""


class Slots:
    """The bookkeeping of one batch. Not thread-safe."""

    def __init__(self, size: int, index: int, batch: int, capacity: int, device: torch.device) -> None:
        """
        Args:
            size, index: context-parallel ranks, and this one's number.
            batch: sequences.
            capacity: slots per rank.

        Raises:
            ValueError: for sizes below 1.
        """
        if min(size, batch, capacity) < 1:
            raise ValueError(f"a cache needs 1 or more ranks, sequences and slots: got {size}, {batch} and {capacity}")
        self.size, self.index, self.batch, self.capacity, self.device = size, index, batch, capacity, device
        self.lengths = [0] * batch
        """Tokens of each sequence."""
        self.held = [[0] * size for _ in range(batch)]
        """Tokens of each sequence on each rank."""
        self.positions = torch.full((capacity, batch), NOWHERE, dtype=torch.int32, device=device)
        """Of what this rank's slots hold: int32 ``[capacity, batch]``."""
        self._keys: tuple[Segments, ...] = ((),) * size
        self._prompt = 0
        self._open = True

    @property
    def used(self) -> int:
        """Slots of this rank that hold a token of any sequence."""
        return max(of_sequence[self.index] for of_sequence in self.held)

    def chunk(self, tokens: int, place: Callable[[int], Segments]) -> Chunk:
        """Place the next ``tokens`` of each sequence's prompt; ValueError after ``close``; CacheFullError if they do
        not fit.

        Args:
            place: rank -> its tokens' positions within the chunk.
        """
        if not self._open:
            raise ValueError("the prompt is complete: decode further tokens")
        share, first = tokens // self.size, self._prompt // self.size
        self.require(self._prompt + tokens)
        by = self._prompt
        rows = tuple(tuple(range(s.start + by, s.stop + by, s.step) for s in place(rank)) for rank in range(self.size))
        self._keys = tuple((*before, *new) for before, new in zip(self._keys, rows, strict=True))
        positions = torch.cat([torch.arange(s.start, s.stop, s.step) for s in rows[self.index]])
        self.positions[first : first + share] = positions.to(self.device, torch.int32).unsqueeze(1)
        self._prompt += tokens
        self.lengths = [self._prompt] * self.batch
        self.held = [[first + share] * self.size for _ in range(self.batch)]
        return Chunk(first, first + share, positions, rows, self._keys)

    def close(self, lengths: Sequence[int]) -> None:
        """The prompt is complete: tokens of sequence i from ``lengths[i]`` on were padding, whose slots become free;
        ValueError for lengths that are not those of such sequences."""
        if len(lengths) != self.batch or any(not 1 <= n <= self._prompt for n in lengths):
            raise ValueError(f"{self.batch} prompts of 1 to {self._prompt} tokens, got lengths {list(lengths)}")
        self._open = False
        self.lengths = list(lengths)
        self.held = [[sum(len(s[: steps_to(s, n)]) for s in segments) for segments in self._keys] for n in lengths]
        self._keys = ((),) * self.size
        bounds = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        self.positions.masked_fill_(self.positions >= bounds, NOWHERE)

    def deal(self, tokens: int) -> Dealt:
        """Assign slots to the next ``tokens`` of each sequence; ValueError before ``close``; CacheFullError if they do
        not fit."""
        if self._open:
            raise ValueError("the prompt is not complete: call close() with the length of each sequence")
        for length in self.lengths:  # before any is dealt, so that a caller can recover
            self.require(length + tokens)
        kept = []
        for sequence, held in enumerate(self.held):
            for token in range(tokens):
                rank = held.index(min(held))
                if rank == self.index:
                    kept.append((token, sequence, held[rank]))
                held[rank] += 1
        starts = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        positions = starts + torch.arange(tokens, dtype=torch.int32, device=self.device).unsqueeze(1)
        rows, columns, slots = torch.tensor(kept, dtype=torch.int64, device=self.device).view(-1, 3).unbind(1)
        self.positions[slots, columns] = positions[rows, columns]
        self.lengths = [n + tokens for n in self.lengths]
        return Dealt(positions, rows, columns, slots, self.used)

    def require(self, tokens: int) -> None:
        """CacheFullError if a sequence of ``tokens`` tokens does not fit; the message says what would be enough."""
        if tokens > self.size * self.capacity:
            raise CacheFullError(
                f"a context of {tokens} tokens does not fit the cache: {self.size} context-parallel ranks with "
                f"{self.capacity} slots each hold {self.size * self.capacity}; it needs "
                f"{slots_for(tokens, self.capacity)} ranks, or {slots_for(tokens, self.size)} slots on each of these"
            )
