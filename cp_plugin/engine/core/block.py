"""A block of attention: queries and keys at known positions, under a mask, and how their scores are made."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import Mask


class Scores(NamedTuple):
    """How a score is made of a query and a key, before the mask."""

    scale: float
    """Factor on their product."""
    softcap: float | None = None
    """Cap: scores s become ``softcap * tanh(s / softcap)`` (Gemma 2, arXiv 2408.00118, section 2); None: no cap."""

    @classmethod
    def from_call(cls, q: Tensor, scale: float | None = None, softcap: float | None = None) -> Scores:
        """Make those of a call with these queries ``[..., d]``; scale None: ``d ** -0.5``."""
        return cls(q.size(-1) ** -0.5 if scale is None else scale, softcap)


PLAIN = Scores(1.0)


class Block(NamedTuple):
    """What one call of a block kernel computes."""

    rows: Segments
    """Global positions of queries, in storage order."""
    keys: Segments
    mask: Mask
    scores: Scores = PLAIN

    @property
    def area(self) -> tuple[Segments, Segments, Mask]:
        """Positions and mask: what is computed, without the scores."""
        return self.rows, self.keys, self.mask
