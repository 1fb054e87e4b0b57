"""Segment algebra of linear attention: a segment of tokens is an affine map of the state.

    S' = through * S + left             o_t = (its own output, from a zero state) + read_t(S)

Segments are chunks within a rank (``chunked``), or what a rank has of the sequence (``cp_plugin.methods.lasp2``).
``through`` is a decay (``decayed``), ``[b, g, x, 1]``, or a matrix (``delta``), ``[b, g, d, d]``; None where nothing
decays. Maps of consecutive segments combine by ``after``, too: through = through_2 * through_1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from cp_plugin.linear import scan
from cp_plugin.linear.decayed import Decayed
from cp_plugin.linear.delta import Delta
from cp_plugin.linear.tokens import Tokens


class Segment(Protocol):
    """What tokens do to a state, and a state to their outputs; all in the accumulation dtype, all differentiable."""

    @property
    def left(self) -> Tensor:
        """What the tokens add to the state: ``[b, g, d, e]``."""
        ...

    @property
    def through(self) -> Tensor | None:
        """What becomes of the incoming state: ``[b, g, x, 1]`` or ``[b, g, d, d]``; None: it stays."""
        ...

    def read(self, incoming: Tensor) -> Tensor:
        """Contribution of the incoming state ``[b, g, d, e]`` to the outputs: ``[t, b, h, e]``."""
        ...

    def read_back(self, dout: Tensor) -> Tensor:
        """Gradient of the incoming state by the outputs', the transpose of ``read``: ``[b, g, d, e]``."""
        ...


def of(x: Tokens) -> Segment:
    """The segment of these tokens."""
    return Decayed(x) if x.beta is None else Delta(x)


def after(incoming: Tensor, left: Tensor, through: Tensor | None = None) -> Tensor:
    """The state after a segment: ``through * incoming + left``."""
    return incoming + left if through is None else scan.times(through, incoming) + left


def recomputed(forward: Callable[[Tokens], Tensor], dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
    """Gradients of ``x.differentiable``, by recomputing the forward."""
    with torch.enable_grad():
        x = detached(x)
        out = forward(x)
        return gradients((out * dout.to(out.dtype)).sum(), x.differentiable)


def detached(x: Tokens) -> Tokens:
    """The tokens as autograd leaves."""
    return Tokens(*(None if t is None else t.detach().requires_grad_() for t in x[:-1]), x.starts)


def at_edges(dout: Tensor, x: Tokens, incoming: Tensor, outgoing: Tensor) -> tuple[Tensor, ...]:
    """Gradients through the incoming and the outgoing state; ``outgoing`` is the latter's gradient."""
    with torch.enable_grad():
        x = detached(x)
        here = of(x)
        added = here.read(incoming)
        left = after(incoming, here.left, here.through)
        return gradients((added * dout.to(added.dtype)).sum() + (left * outgoing).sum(), x.differentiable)


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of a scalar with respect to all leaves; zeros for unused ones."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
