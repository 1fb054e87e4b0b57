"""What is benchmarked: one case for each kind of mask that context parallelism supports, on one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.problem import Problem

WINDOW = 1024
"""Tokens before itself that a token sees in a sliding window by default."""
FULL, CAUSAL, WINDOWED, PACKED = MASKS = ("full", "causal", "causal-window", "causal-document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One mask on one attention call."""

    mask_name: str
    problem: Problem
    bounds: tuple[int, ...] = ()
    """Where the documents begin, and the length of the sequence; empty: one document."""

    @property
    def mask(self) -> Mask:
        """For kernels."""
        return self.problem.mask(self.bounds)

    @property
    def cu_seqlens(self) -> Tensor | None:
        """For ``ContextParallel.attention``."""
        return torch.tensor(self.bounds) if self.bounds else None

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one sequence and head."""
        tokens = self.problem.seq_length
        first, last = self.mask.interval(torch.arange(tokens), tokens)
        return int((last - first).sum())

    def small(self, tokens: int) -> Case:
        """The same case on a shorter sequence: windows and documents shrink in proportion."""
        whole, window = self.problem.seq_length, self.problem.window
        if window is not None:
            window = (max(1, window[0] * tokens // whole), 0)
        bounds = tuple(dict.fromkeys(b * tokens // whole for b in self.bounds))
        return replace(self, problem=replace(self.problem, seq_length=tokens, window=window), bounds=bounds)


def make_case(mask_name: str, problem: Problem, *, window: int | None = None, bounds: tuple[int, ...] = ()) -> Case:
    """A mask on a problem, whose causal, window and documents are replaced by the mask's; ValueError for an unknown
    mask.

    Args:
        window: tokens before itself that a token sees; None: ``WINDOW``, or an eighth of a short sequence.
        bounds: of the documents, for the mask that has some.
    """
    one_of("--mask", mask_name, MASKS)
    reach = min(WINDOW, max(1, problem.seq_length // 8)) if window is None else window
    problem = replace(
        problem,
        causal=mask_name != FULL,
        documents=mask_name == PACKED,
        window=(reach, 0) if mask_name == WINDOWED else None,
    )
    return Case(mask_name=mask_name, problem=problem, bounds=bounds if mask_name == PACKED else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lognormal lengths up to ``longest``, mixed with documents of one fixed length."""

    median: int
    sigma: float
    longest: int
    share: float = 0
    """Share of documents with ``same`` tokens."""
    same: int = 65_536

    def pack(self, tokens: int, seed: int = 0) -> tuple[int, ...]:
        """Documents that fill a pack; the last one is truncated."""
        rng = np.random.default_rng(seed)
        lengths: list[int] = []
        while (room := tokens - sum(lengths)) > 0:
            drawn = min(self.longest, int(self.median * np.exp(self.sigma * rng.standard_normal())))
            lengths.append(min(room, self.same if rng.random() < self.share else max(1, drawn)))
        return tuple(lengths)


LENGTHS = {
    "chat": Lengths(median=600, sigma=1.2, longest=24_576),
    "code": Lengths(median=12_000, sigma=1.2, longest=98_304),
    "long": Lengths(median=500, sigma=1.2, longest=16_384, share=0.045),
}
"""Conversations; code repositories; conversations mixed with a few 64k-token documents."""
TOKENS = 16_384  # of a rank, in packs drawn from them
