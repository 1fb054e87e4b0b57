"""One way to compute attention over all ranks: the interface, and a provider of this project behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import Inputs, through_autograd
from cp_plugin.core.problem import Problem
from cp_plugin.core.text import in_words


def nothing() -> None:
    """Between a forward and its backward, where nothing is to be done."""


class Contestant(Protocol):
    """One way to compute attention over all ranks. Whole tensors are ``[s, b, heads, d]``."""

    @property
    def settings(self) -> str:
        """What was chosen, in a few words."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Why it was chosen; a sentence each."""
        ...

    def shard(self, x: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the contestant's own order of dimensions."""
        ...

    def arranged(self, x: Tensor) -> Tensor:
        """A part ``[s / size, b, heads, d]`` in that order."""
        ...

    def step(self, x: Inputs, between: Callable[[], object] = nothing) -> tuple[Tensor, ...]:
        """Forward, ``between``, and backward on this rank's parts: ``testing.oracle.TENSORS``."""
        ...

    def booked(self) -> int | None:
        """Bytes this rank has sent since the last call, by the ledger; None without one."""
        ...


class Provided:
    """A provider of this project, as a ``Contestant``."""

    def __init__(self, cp: ContextParallel, problem: Problem, cu_seqlens: Tensor | None = None) -> None:
        """
        Args:
            problem: with causal and window of the mask.
            cu_seqlens: where the documents of the whole sequence begin, and its length.
        """
        self._cp, self._problem, self._cu_seqlens = cp, problem, cu_seqlens
        self.notes = tuple(cp.why)

    @property
    def settings(self) -> str:
        shown = (f"{name} {in_words(value)}" for name, value in self._cp.options.chosen.items())
        return ", ".join([self._cp.layout.name, *shown])

    def shard(self, x: Tensor) -> Tensor:
        return x if x.dim() == 1 else self._cp.shard(x).contiguous()  # a decay per head is not of tokens

    def arranged(self, x: Tensor) -> Tensor:
        return x

    def step(self, x: Inputs, between: Callable[[], object] = nothing) -> tuple[Tensor, ...]:
        leaves = Inputs(*(None if y is None else y.detach().requires_grad_() for y in x))
        return through_autograd(self._cp, leaves, self._problem, between, self._cu_seqlens)

    def booked(self) -> int:
        sent = self._cp.mesh.ledger.bytes()
        self._cp.mesh.ledger.reset()
        return sent
