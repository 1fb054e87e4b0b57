"""Segment algebra of linear attention: a segment of tokens is an affine map of the state.

    S' = factor * S + left             o_t = (its own output, from a zero state) + read_t(S)

Segments are chunks within a rank, or what a rank has of the sequence (``engine.methods.lasp2``). ``factor`` is
a decay (``decayed``), ``[b, g, x, 1]``, or a matrix (``delta``), ``[b, g, d, d]``; None where nothing decays. Maps
of consecutive segments combine by ``advance``, too: factor = factor_2 * factor_1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cp_plugin.engine.linear import scan
from cp_plugin.engine.linear.tokens import Tokens

Forward = Callable[[Tokens], Tensor]
"""Causal linear attention of segments from a zero state: ``[t, b, h, e]`` in the accumulation dtype; differentiable."""
Backward = Callable[[Tensor, Tokens], tuple[Tensor, ...]]
"""(gradient of a ``Forward``'s outputs, tokens) -> gradients of ``Tokens.differentiable``."""
Run = Callable[[Tokens, Tensor | None], tuple[Tensor, Tensor]]
"""(tokens, the state before them) -> outputs, and the state after them in the accumulation dtype; differentiable."""


class Segment(ABC):
    """What tokens do to a state, and a state to their outputs; all in the accumulation dtype, all differentiable.

    A layer builds it once in its forward, and once in its backward: there from autograd's leaves.
    """

    left: Tensor
    """What the tokens add to the state: ``[b, g, d, e]``."""
    factor: Tensor | None
    """What becomes of the incoming state: ``[b, g, x, 1]`` or ``[b, g, d, d]``; None: it stays."""
    queries: Tensor
    """What reads the incoming state: ``[t, b, g, r, d]``."""
    kept: tuple[Tensor, ...] = ()
    """What a forward pass leaves to the backward pass besides the tokens."""

    def __init__(self, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> None:
        """kept: in a backward pass, what the forward's segment kept."""
        self.x = x if kept is None else detached(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() or kept is not None):
            self._build()

    @abstractmethod
    def _build(self) -> None:
        """Compute what all methods need of ``x``."""

    def read(self, incoming: Tensor) -> Tensor:
        """Contribution of the incoming state ``[b, g, d, e]`` to the outputs: ``[t, b, h, e]``."""
        return torch.einsum("tbgrd,bgde->tbgre", self.queries, incoming).flatten(2, 3)

    def read_back(self, dout: Tensor) -> Tensor:
        """Gradient of the incoming state by the outputs', the transpose of ``read``: ``[b, g, d, e]``."""
        q = self.queries
        return torch.einsum("tbgrd,tbgre->bgde", q, dout.to(q.dtype).unflatten(2, q.shape[2:4]))

    def outputs(self, forward: Forward) -> Tensor:
        """In a forward pass: from a zero state; forward: the kernel's."""
        return forward(self.x)

    def gradients(
        self, backward: Backward, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]
    ) -> tuple[Tensor, ...]:
        """In a backward pass: gradients of ``Tokens.differentiable``.

        Args:
            backward: the kernel's.
            incoming: the state before the segment.
            outgoing: waits for the gradient of the state after it.
        """
        inside = backward(dout, self.x)  # compute
        across = self.edge_gradients(dout, incoming, outgoing())  # wait
        return tuple(a + b for a, b in zip(inside, across, strict=True))  # add

    def edge_gradients(self, dout: Tensor, incoming: Tensor, outgoing: Tensor) -> tuple[Tensor, ...]:
        """In a backward pass: gradients through the incoming and the outgoing state alone.

        outgoing: the gradient of the state after the segment.
        """
        with torch.enable_grad():
            after_it = advance(incoming, self.left, self.factor)
            return gradients([(self.read(incoming), dout), (after_it, outgoing)], self.x.differentiable)


def advance(incoming: Tensor, left: Tensor, factor: Tensor | None = None) -> Tensor:
    """The state after a segment: ``factor * incoming + left``."""
    return incoming + left if factor is None else scan.step(left, factor, incoming)


def recomputed(forward: Forward, dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
    """Gradients of ``x.differentiable``, by recomputing the forward."""
    with torch.enable_grad():
        x = detached(x)
        return gradients([(forward(x), dout)], x.differentiable)


def detached(x: Tokens) -> Tokens:
    """The tokens as autograd leaves."""
    return Tokens(*(None if t is None else t.detach().requires_grad_() for t in x[:-1]), x.starts)


def run_gradients(run: Run, leaves: Tokens, dout: Tensor, incoming: Tensor, outgoing: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a run from the incoming state."""
    with torch.enable_grad():
        out, after_it = run(leaves, incoming)
        return gradients([(out, dout), (after_it, outgoing)], leaves.differentiable)


def gradients(results: Sequence[tuple[Tensor, Tensor]], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of all leaves, from (result, gradient of it); zeros for unused ones."""
    used = [(out, dout.to(out.dtype)) for out, dout in results if out.requires_grad]
    if not used:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    outs, douts = zip(*used, strict=True)
    return torch.autograd.grad(outs, leaves, douts, allow_unused=True, materialize_grads=True)
