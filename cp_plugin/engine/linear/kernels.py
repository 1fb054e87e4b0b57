"""Kernel selection for linear attention within a segment."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.common.names import not_one_of
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.linear import fla, recurrence, rules
from cp_plugin.engine.linear.delta import Widened
from cp_plugin.engine.linear.rules import rule_of
from cp_plugin.engine.linear.segment import Backward, Forward, Run, Segment, recomputed
from cp_plugin.engine.linear.tokens import Tokens


class Kernel(NamedTuple):
    """Causal linear attention of segments."""

    name: str
    forward: Forward
    backward: Backward
    run: Run | None = None
    """From an initial state, for segments under the delta rule; None: chunk by chunk."""

    def segment(self, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> Segment:
        """These tokens as a segment; kept: in a backward pass, what the forward's kept."""
        rule = rule_of(x)
        return Widened(self.run, x, kept) if rule.matrix and self.run is not None else rule.segment(x, kept)


_FORWARDS: dict[str, tuple[Forward, Run | None]] = {
    "fla": (fla.forward, fla.run),
    "chunked": (rules.forward, None),
    "reference": (recurrence.forward, recurrence.run),
}
KERNELS = {name: Kernel(name, one, partial(recomputed, one), run) for name, (one, run) in _FORWARDS.items()}
"""``auto`` prefers fla and falls back to chunked."""


def check_name(name: str) -> None:
    """ValueError for an unknown name."""
    if name not in ("auto", *KERNELS):
        raise ValueError(not_one_of(spelled("backend", name), name, ("auto", *KERNELS)))


class Choice(NamedTuple):
    """A kernel, and why it was chosen."""

    kernel: Kernel
    why: str


def choose(name: str, device: torch.device, problem: Problem) -> Choice:
    """The named kernel, or for ``auto`` the fastest one that supports the call. ValueError for an unknown name or a
    kernel that cannot run this. For ``auto`` also if per-dimension decay (GLA) would fall back to plain torch only for
    what this machine lacks for fla: that computes all pairs of 16 tokens in every dimension."""
    check_name(name)
    missing = fla.unsupported(device, problem)
    reason = missing or fla.lacking(device, problem)
    if name == "fla" and reason is not None:
        instead = spelled("backend", "chunked", "auto")
        raise ValueError(f"{spelled('backend', 'fla')} cannot run here: {reason}; use {instead}")
    if name != "auto":
        return Choice(KERNELS[name], "requested")
    if reason is None:
        return Choice(KERNELS["fla"], "the kernels of flash-linear-attention run here")
    if problem.decay == "key" and missing is None:
        raise ValueError(
            f"{spelled('backend', 'auto')}: a decay per key dimension (gla) on CUDA needs the kernels of "
            f"flash-linear-attention: {reason}. Plain torch, {spelled('backend', 'chunked')}, runs without them, but "
            "many times slower"
        )
    return Choice(KERNELS["chunked"], f"plain torch, because fla does not run: {reason}")
