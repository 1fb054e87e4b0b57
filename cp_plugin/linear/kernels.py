"""Which kernel computes linear attention inside a segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.linear import chunked, recurrence
from cp_plugin.linear.segment import Tokens


class Kernel(NamedTuple):
    """Causal linear attention of segments from a state of zero."""

    name: str
    forward: Callable[[Tokens], Tensor]
    """Outputs ``[t, b, h, e]`` in the accumulation dtype."""
    backward: Callable[[Tensor, Tokens], tuple[Tensor, ...]]
    """dout, tokens -> gradients of q, k, v and, where there is one, the log decay."""


KERNELS = {
    "chunked": Kernel("chunked", chunked.forward, chunked.backward),
    "reference": Kernel("reference", recurrence.forward, recurrence.backward),
}
"""The first is the one that ``auto`` takes."""


def check_name(name: str) -> None:
    """ValueError for a name that is neither a kernel nor ``auto``."""
    if name not in ("auto", *KERNELS):
        raise ValueError(f"unknown backend {name!r}: linear attention has auto, {', '.join(KERNELS)}")


def choose(name: str, device: torch.device) -> Kernel:
    """The kernel of that name."""
    check_name(name)
    return KERNELS["chunked" if name == "auto" else name]
