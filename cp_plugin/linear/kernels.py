"""Kernel selection for linear attention within a segment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.core.problem import Decay
from cp_plugin.linear import chunked, fla, recurrence
from cp_plugin.linear.segment import recomputed
from cp_plugin.linear.tokens import Tokens


class Kernel(NamedTuple):
    """Causal linear attention of segments from a zero state."""

    name: str
    forward: Callable[[Tokens], Tensor]
    """Outputs ``[t, b, h, e]`` in the accumulation dtype."""
    backward: Callable[[Tensor, Tokens], tuple[Tensor, ...]]
    """(dout, tokens) -> gradients of ``Tokens.differentiable``."""


_FORWARDS = {"fla": fla.forward, "chunked": chunked.forward, "reference": recurrence.forward}
KERNELS = {name: Kernel(name, forward, partial(recomputed, forward)) for name, forward in _FORWARDS.items()}
"""``auto`` prefers fla and falls back to chunked."""


def check_name(name: str) -> None:
    """ValueError for an unknown name."""
    if name not in ("auto", *KERNELS):
        raise ValueError(f"unknown backend {name!r}: linear attention has auto, {', '.join(KERNELS)}")


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    documents: bool = False,
    decay: Decay = "none",
    delta: bool = False,
) -> Kernel:
    """The named kernel, or for ``auto`` the fastest one that supports the call.

    Args:
        documents: whether documents may begin inside segments.
        delta: whether values are written by the delta rule.

    Raises:
        ValueError: for an unknown name or a kernel that cannot run this. For ``auto`` also if per-dimension decay (GLA)
            would fall back to plain torch only because fla is not installed: that computes all pairs of 16 tokens in
                every
            dimension.
    """
    check_name(name)
    reason = _not_fla(device, dtype, documents, delta)
    if name == "fla" and reason is not None:
        raise ValueError(f"backend fla: {reason}; use chunked, or auto")
    if name == "auto":
        if decay == "key" and reason == _MISSING:
            raise ValueError(
                "backend auto: a decay of each key dimension (--cp-linear-attention gla) on CUDA needs the kernels of "
                "flash-linear-attention, which is not installed: pip install 'cp-plugin[fla]'. Without it, ask for "
                "plain torch by name, --cp-backend chunked: it is many times slower"
            )
        name = "chunked" if reason is not None else "fla"
    return KERNELS[name]


_MISSING = "flash-linear-attention is not installed (pip install 'cp-plugin[fla]')"


def _not_fla(device: torch.device, dtype: torch.dtype, documents: bool, delta: bool) -> str | None:
    """Why fla cannot run, or None."""
    if device.type != "cuda":
        return f"its Triton kernels need a CUDA device, and this is {device.type}"
    if dtype == torch.float64:
        return "its Triton kernels do not compute in float64"
    if delta and dtype == torch.float32:
        return "its kernels of the delta rule take half precision only"
    if documents:
        return "its kernels take packed documents for a batch of one only"
    return None if fla.installed() else _MISSING
