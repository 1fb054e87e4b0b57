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
    return incoming + left if through is None else scan.step(left, through, incoming)


def recomputed(forward: Callable[[Tokens], Tensor], dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
    """Gradients of ``x.differentiable``, by recomputing the forward."""
    with torch.enable_grad():
        x = detached(x)
        return gradients([(forward(x), dout)], x.differentiable)


def detached(x: Tokens) -> Tokens:
    """The tokens as autograd leaves."""
    return Tokens(*(None if t is None else t.detach().requires_grad_() for t in x[:-1]), x.starts)


def differentiable(x: Tokens) -> tuple[Tokens, Segment]:
    """The tokens as autograd leaves, and the segment of these."""
    with torch.enable_grad():
        leaves = detached(x)
        return leaves, of(leaves)


def at_edges(dout: Tensor, leaves: Tokens, here: Segment, incoming: Tensor, outgoing: Tensor) -> tuple[Tensor, ...]:
    """Gradients through the incoming and the outgoing state of a ``differentiable`` segment.

    outgoing: the gradient of the outgoing state.
    """
    with torch.enable_grad():
        after_it = after(incoming, here.left, here.through)
        return gradients([(here.read(incoming), dout), (after_it, outgoing)], leaves.differentiable)


def of_run(
    run: Callable[[Tokens, Tensor], tuple[Tensor, Tensor]],
    leaves: Tokens,
    dout: Tensor,
    incoming: Tensor,
    outgoing: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of a run from the incoming state, which returns outputs and the outgoing state."""
    with torch.enable_grad():
        out, after_it = run(leaves, incoming)
        return gradients([(out, dout), (after_it, outgoing)], leaves.differentiable)


def gradients(results: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Of all leaves, from (result, gradient of it); zeros for unused ones."""
    used = [(out, dout.to(out.dtype)) for out, dout in results if out.requires_grad]
    if not used:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    outs, douts = zip(*used, strict=True)
    return torch.autograd.grad(outs, leaves, douts, allow_unused=True, materialize_grads=True)
