"""The masks of LongCA-bench (arXiv 2510.17896) that context parallelism supports, on one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cp_plugin.cli.bench import lengths, names
from cp_plugin.core.mask import Mask
from cp_plugin.core.problem import Problem

WINDOW = 1024
"""Tokens before and, without a causal mask, after itself that a token sees in a sliding window by default."""
OTHERS = (
    "share-question",
    "global-sliding",
    "causal-blockwise",
    "prefix-lm-causal",
    "prefix-lm-document",
    "block-causal-document",
)
"""LongCA-bench's masks that neither a causal mask, a window nor documents describe: no method here knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A mask by its name."""

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
    """Where the lengths of the documents are from."""
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
        """What the name does not say."""
        if self.problem.window is not None:
            before, after = self.problem.window
            return f"a token sees {before} before itself" + (f" and {after} after" if after else "")
        if self.bounds:
            count, longest = len(self.bounds) - 1, max(b - a for a, b in pairwise(self.bounds))
            return f"{count} document{'s' * (count > 1)} as in {self.distribution}, the longest {longest}"
        return ""

    def on(self, hosts: tuple[str, ...]) -> Case:
        """The same with the host of every rank."""
        return replace(self, problem=replace(self.problem, hosts=hosts))

    def small(self, tokens: int) -> Case:
        """The same on a sequence of so many tokens: windows and documents shrink with it."""
        whole, window = self.problem.seq_length, self.problem.window
        if window is not None:
            window = tuple(n and max(1, n * tokens // whole) for n in window)
        bounds = tuple(dict.fromkeys(b * tokens // whole for b in self.bounds))
        return replace(self, problem=replace(self.problem, seq_length=tokens, window=window), bounds=bounds)


def make_case(
    mask_name: str, problem: Problem, *, window: int | None = None, distribution: str | None = None, seed: int = 0
) -> Case:
    """A mask on a problem, of which causal, window and documents are taken from the mask.

    Args:
        window: tokens before (and after) itself that a token sees; None: ``WINDOW``, or an eighth of a short sequence.
        distribution: of the lengths of documents; None: LongCA-bench's choice for such a sequence.

    Raises:
        ValueError: for an unknown mask or distribution, or a window of no token.
    """
    if mask_name in OTHERS:
        raise ValueError(f"--mask {mask_name}: no method here has such a mask: use one of {', '.join(PATTERNS)}")
    names.check("--mask", mask_name, PATTERNS)
    pattern, seq_length = PATTERNS[mask_name], problem.seq_length
    problem = replace(problem, causal=pattern.causal, documents=pattern.packed, window=None)
    if pattern.windowed:
        reach = min(WINDOW, max(1, seq_length // 8)) if window is None else window
        if reach < 1:
            raise ValueError(f"--window {window}: a token sees at least 1 other; for none leave the window masks out")
        problem = replace(problem, window=(reach, 0 if pattern.causal else reach))
    if not pattern.packed:
        return Case(mask_name=mask_name, problem=problem)
    name = distribution or lengths.default(seq_length)
    found = lengths.bounds(name, seq_length, seed)
    return Case(mask_name=mask_name, problem=problem, distribution=name, bounds=found)
