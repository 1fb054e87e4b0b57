"""A segment in one pass of a layer: built once, for the states that it exchanges and for its outputs or gradients.

    Added       decays: the kernel runs while states travel; what depends on them is added
    InChunks    the delta rule in plain torch, whose chunks have maps of the state and outputs
    Widened     the delta rule by any kernel that takes an initial state, run on wider values

Under the delta rule the maps of a segment need the same triangular systems as its outputs. Columns of a state do not
mix, so one run with d more columns of values, all zero, which start from the identity, has the maps in them:

    values [v | 0]  from the state [0 | I]:    outputs [own | queries]    final state [left | through]
    from a state S:                            own + queries S            left + through S
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.linear import segment
from cp_plugin.linear.delta import Delta
from cp_plugin.linear.segment import Segment
from cp_plugin.linear.tokens import Tokens

Run = Callable[[Tokens, Tensor | None], tuple[Tensor, Tensor]]
"""(tokens, the state before them) -> outputs, and the state after them in the accumulation dtype; differentiable."""


class Pass(Segment, Protocol):
    """A segment in a forward, or in a backward: all of them take the tokens, and in a backward what was kept."""

    kept: tuple[Tensor, ...]
    """What a forward leaves to the backward besides the tokens."""

    def outputs(self) -> Tensor:
        """In a forward: from a zero state, ``[t, b, h, e]`` in the accumulation dtype."""
        ...

    def gradients(self, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """In a backward: of ``Tokens.differentiable``.

        Args:
            incoming: the state before the segment.
            outgoing: waits for the gradient of the state after it.
        """
        ...


class _Built:
    """Around a segment that is built once in each pass; in a backward by autograd's leaves."""

    kept: tuple[Tensor, ...] = ()

    def __init__(self, x: Tokens, kept: tuple[Tensor, ...] | None) -> None:
        self.x = x
        if kept is None:
            self.here = segment.of(x)
        else:
            self.leaves, self.here = segment.differentiable(x)

    @property
    def left(self) -> Tensor:
        return self.here.left

    @property
    def through(self) -> Tensor | None:
        return self.here.through

    def read(self, incoming: Tensor) -> Tensor:
        return self.here.read(incoming)

    def read_back(self, dout: Tensor) -> Tensor:
        return self.here.read_back(dout)


class Added(_Built):
    """A ``Pass`` without the delta rule."""

    def __init__(
        self,
        forward: Callable[[Tokens], Tensor],
        backward: Callable[[Tensor, Tokens], tuple[Tensor, ...]],
        x: Tokens,
        kept: tuple[Tensor, ...] | None,
    ) -> None:
        super().__init__(x, kept)
        self._forward, self._backward = forward, backward

    def outputs(self) -> Tensor:
        return self._forward(self.x)

    def gradients(self, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        inside = self._backward(dout, self.x)  # compute
        at_edges = segment.at_edges(dout, self.leaves, self.here, incoming, outgoing())  # wait
        return tuple(a + b for a, b in zip(inside, at_edges, strict=True))  # add


class InChunks(_Built):
    """A ``Pass`` under the delta rule, chunk by chunk."""

    here: Delta

    def __init__(self, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> None:
        super().__init__(x, kept)
        self._out, self._left = self.here.run() if kept is None else (None, None)

    @property
    def left(self) -> Tensor:
        return self._left

    def outputs(self) -> Tensor:
        return self._out

    def gradients(self, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return segment.of_run(lambda x, state: self.here.run(state), self.leaves, dout, incoming, outgoing())


class Widened:
    """A ``Pass`` under the delta rule, from one run of a kernel."""

    def __init__(self, run: Run, x: Tokens, kept: tuple[Tensor, ...] | None = None) -> None:
        self._run, self._x = run, x
        if kept is None:
            e, d = x.v.size(3), x.k.size(3)
            identity = torch.eye(d, dtype=accumulation_dtype(x.q.dtype), device=x.q.device)
            initial = pad(identity, (e, 0)).expand(*x.k.shape[1:3], d, e + d)
            out, final = run(x._replace(v=pad(x.v, (0, d))), initial)
            self._own, queries = out.split((e, d), 3)
            self.left, through = final.split((e, d), 3)
            kept = queries.contiguous(), through
        self.kept = kept

    @property
    def through(self) -> Tensor:
        return self.kept[1]

    def outputs(self) -> Tensor:
        return self._own.to(self.through.dtype)

    def read(self, incoming: Tensor) -> Tensor:
        return torch.einsum("tbgrd,bgde->tbgre", self._queries, incoming).flatten(2, 3)

    def read_back(self, dout: Tensor) -> Tensor:
        q = self._queries
        return torch.einsum("tbgrd,tbgre->bgde", q, dout.to(q.dtype).unflatten(2, q.shape[2:4]))

    def gradients(self, dout: Tensor, incoming: Tensor, outgoing: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        return segment.of_run(self._run, segment.detached(self._x), dout, incoming, outgoing())

    @property
    def _queries(self) -> Tensor:
        return self.kept[0].to(self.through.dtype).unflatten(2, (self._x.k.size(2), -1))
