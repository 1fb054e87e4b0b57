"""Document lengths drawn from named distributions that resemble training data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
