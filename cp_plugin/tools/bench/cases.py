"""What is benchmarked: one problem for each kind of mask that context parallelism supports, on one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.core.problem import Problem

WINDOW = 1024
"""Tokens before itself that a token sees in a sliding window by default."""
FULL, CAUSAL, WINDOWED, PACKED = MASKS = ("full", "causal", "causal-window", "causal-document")


def with_mask(name: str, problem: Problem, *, window: int | None = None, bounds: tuple[int, ...] = ()) -> Problem:
    """A problem with a mask in place of its own; ValueError for an unknown mask.

    Args:
        window: tokens before itself that a token sees; None: ``WINDOW``, or an eighth of a short sequence.
        bounds: of the documents, for the mask that has some.
    """
    one_of("--mask", name, MASKS)
    reach = min(WINDOW, max(1, problem.seq_length // 8)) if window is None else window
    return replace(
        problem,
        causal=name != FULL,
        window=(reach, 0) if name == WINDOWED else None,
        documents=name == PACKED,
        bounds=bounds if name == PACKED else (),
    )


def mask_name(problem: Problem) -> str:
    """Name the mask of a problem from ``with_mask``."""
    if problem.documents:
        return PACKED
    return WINDOWED if problem.window is not None else CAUSAL if problem.causal else FULL


def pairs(problem: Problem) -> int:
    """Count the visible (query, key) pairs of one sequence and head."""
    tokens = problem.seq_length
    first, last = problem.mask().interval(torch.arange(tokens), tokens)
    return int((last - first).sum())


def shortened(problem: Problem, tokens: int) -> Problem:
    """The same problem on a shorter sequence: windows and documents shrink in proportion."""
    whole, window = problem.seq_length, problem.window
    if window is not None:
        window = (max(1, window[0] * tokens // whole), 0)
    bounds = tuple(dict.fromkeys(b * tokens // whole for b in problem.bounds))
    return replace(problem, seq_length=tokens, window=window, bounds=bounds)


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
        """Draw documents that fill a pack; the last one is truncated."""
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
