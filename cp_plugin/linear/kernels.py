"""Kernel selection for linear attention within a segment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.common.names import not_one_of
from cp_plugin.core.problem import Problem
from cp_plugin.core.spelling import spelled
from cp_plugin.linear import chunked, fla, recurrence
from cp_plugin.linear.passes import Added, InChunks, Pass, Widened
from cp_plugin.linear.segment import recomputed
from cp_plugin.linear.tokens import Tokens


class Kernel(NamedTuple):
    """Causal linear attention of segments from a zero state."""

    name: str
    forward: Callable[[Tokens], Tensor]
    """Outputs ``[t, b, h, e]`` in the accumulation dtype."""
    backward: Callable[[Tensor, Tokens], tuple[Tensor, ...]]
    """(dout, tokens) -> gradients of ``Tokens.differentiable``."""
    delta: Callable[[Tokens, tuple[Tensor, ...] | None], Pass] = InChunks
    """``segment`` under the delta rule."""

    def segment(self, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> Pass:
        """A segment in one pass.

        kept: in a backward, what the forward's pass kept.
        """
        return Added(self.forward, self.backward, x, kept) if x.beta is None else self.delta(x, kept)


_FORWARDS = {
    "fla": (fla.forward, partial(Widened, fla.run)),
    "chunked": (chunked.forward, InChunks),
    "reference": (recurrence.forward, partial(Widened, recurrence.run)),
}
KERNELS = {name: Kernel(name, one, partial(recomputed, one), delta) for name, (one, delta) in _FORWARDS.items()}
"""``auto`` prefers fla and falls back to chunked."""


def check_name(name: str) -> None:
    """ValueError for an unknown name."""
    if name not in ("auto", *KERNELS):
        raise ValueError(not_one_of(spelled("backend", name), name, ("auto", *KERNELS)))


class Choice(NamedTuple):
    """A kernel, and why it was chosen."""

    kernel: Kernel
    why: str


def unsupported(name: str, device: torch.device, problem: Problem) -> str | None:
    """Why a kernel cannot compute a call on this device with what is installed here; None if it can."""
    check_name(name)
    if name != "fla":
        return None
    return fla.unsupported(device, problem) or fla.lacking(device, problem)


def choose(name: str, device: torch.device, problem: Problem) -> Choice:
    """The named kernel, or for ``auto`` the fastest one that supports the call. ValueError for an unknown name or a
    kernel that cannot run this. For ``auto`` also if per-dimension decay (GLA) would fall back to plain torch only for
    what this machine lacks for fla: that computes all pairs of 16 tokens in every dimension."""
    reason = unsupported("fla", device, problem)
    check_name(name)
    if name == "fla" and reason is not None:
        instead = spelled("backend", "chunked", "auto")
        raise ValueError(f"{spelled('backend', 'fla')} cannot run here: {reason}; use {instead}")
    if name != "auto":
        return Choice(KERNELS[name], "requested")
    if reason is None:
        return Choice(KERNELS["fla"], "the kernels of flash-linear-attention run here")
    if problem.decay == "key" and fla.unsupported(device, problem) is None:
        raise ValueError(
            f"{spelled('backend', 'auto')}: a decay per key dimension (gla) on CUDA needs the kernels of "
            f"flash-linear-attention: {reason}. Plain torch, {spelled('backend', 'chunked')}, runs without them, but "
            "many times slower"
        )
    return Choice(KERNELS["chunked"], f"plain torch, because fla does not run: {reason}")
