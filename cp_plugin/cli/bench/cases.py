"""The masks of LongCA-bench (arXiv 2510.17896) that context parallelism supports, on one sequence.

Documents are packed as in public training data: their lengths are drawn from the distributions of ``lengths.toml``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cp_plugin.common.names import one_of
from cp_plugin.core.mask import Mask
from cp_plugin.core.problem import Problem

WINDOW = 1024
"""Tokens before and, without a causal mask, after itself that a token sees in a sliding window by default."""


class Pattern(NamedTuple):
    causal: bool
    windowed: bool = False
    packed: bool = False


PATTERNS = {
    "full": Pattern(causal=False),
    "causal": Pattern(causal=True),
    "full-window": Pattern(causal=False, windowed=True),
    "causal-window": Pattern(causal=True, windowed=True),
    "full-document": Pattern(causal=False, packed=True),
    "causal-document": Pattern(causal=True, packed=True),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mask on one attention call."""

    mask_name: str
    problem: Problem
    distribution: str | None = None
    """Of the document lengths."""
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

    @cached_property
    def visible(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each query sees, and the one after the last: int64 ``[seq_length]``."""
        tokens = self.problem.seq_length
        first, last = self.mask.interval(torch.arange(tokens), tokens)
        return first.numpy(), last.numpy()

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of one sequence and head."""
        first, last = self.visible
        return int((last - first).sum())

    @property
    def described(self) -> str:
        """The window or the documents, in words."""
        if self.problem.window is not None:
            before, after = self.problem.window
            return f"a token sees {before} before itself" + (f" and {after} after" if after else "")
        if self.bounds:
            count, longest = len(self.bounds) - 1, max(b - a for a, b in pairwise(self.bounds))
            return f"{count} document{'s' * (count > 1)} as in {self.distribution}, the longest {longest}"
        return ""

    def on(self, hosts: tuple[str, ...]) -> Case:
        """The same case with the host of every rank."""
        return replace(self, problem=replace(self.problem, hosts=hosts))

    def small(self, tokens: int) -> Case:
        """The same case on a shorter sequence: windows and documents shrink in proportion."""
        whole, window = self.problem.seq_length, self.problem.window
        if window is not None:
            window = tuple(n and max(1, n * tokens // whole) for n in window)
        bounds = tuple(dict.fromkeys(b * tokens // whole for b in self.bounds))
        return replace(self, problem=replace(self.problem, seq_length=tokens, window=window), bounds=bounds)


def make_case(
    mask_name: str, problem: Problem, *, window: int | None = None, distribution: str | None = None, seed: int = 0
) -> Case:
    """A mask on a problem, whose causal, window and documents are replaced by the mask's; ValueError for an unknown
    mask or distribution, or a window of no token.

    Args:
        window: tokens before (and after) itself that a token sees; None: ``WINDOW``, or an eighth of a short sequence.
        distribution: of the lengths of documents; None: LongCA-bench's choice for such a sequence.
    """
    one_of("--mask", mask_name, PATTERNS)
    pattern, seq_length = PATTERNS[mask_name], problem.seq_length
    problem = replace(problem, causal=pattern.causal, documents=pattern.packed, window=None)
    if pattern.windowed:
        reach = min(WINDOW, max(1, seq_length // 8)) if window is None else window
        problem = replace(problem, window=(reach, 0 if pattern.causal else reach))
    if not pattern.packed:
        return Case(mask_name=mask_name, problem=problem)
    name = distribution or default_distribution(seq_length)
    bounds = document_bounds(name, seq_length, seed)
    return Case(mask_name=mask_name, problem=problem, distribution=name, bounds=bounds)


class Distribution(NamedTuple):
    """How long documents are, in tokens."""

    upper: tuple[int, ...]
    """Ends of the bins, the first of which begins at 1."""
    share: tuple[float, ...]
    """Share of all documents that falls into each bin."""
    up_to: int | None
    """The longest sequence for which it is the default; None: any."""


@cache
def distributions() -> dict[str, Distribution]:
    """Name -> distribution, in the order of ``lengths.toml``."""
    content = tomllib.loads((files(__package__) / "lengths.toml").read_text())
    return {
        name: Distribution(tuple(table["upper"]), tuple(table["share"]), table.get("up_to"))
        for name, table in content.items()
    }


def default_distribution(seq_length: int) -> str:
    """LongCA-bench's distribution for sequences of this length."""
    return next(name for name, d in distributions().items() if d.up_to is None or seq_length <= d.up_to)


def document_bounds(name: str, seq_length: int, seed: int) -> tuple[int, ...]:
    """Where the documents of a packed sequence begin, and its length; the last document is cut to fit.

    A bin is drawn by its share, a length inside it uniformly in its logarithm. ValueError for an unknown distribution.
    """
    one_of("--distribution", name, distributions())
    found, generator = distributions()[name], np.random.default_rng(seed)
    lower, share = (1, *found.upper[:-1]), np.array(found.share) / sum(found.share)
    ends = [0]
    while ends[-1] < seq_length:
        number = generator.choice(len(share), p=share)
        length = lower[number] * (found.upper[number] / lower[number]) ** generator.random()
        ends.append(min(seq_length, ends[-1] + int(length)))
    return tuple(ends)


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
