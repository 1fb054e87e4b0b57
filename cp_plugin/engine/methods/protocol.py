"""The interfaces that methods implement and compose.

**A context-parallel method has the same interface as the attention kernel it distributes** (``Attend``), so methods
wrap kernels, and each other. A method file registers ``Provider``s: a name, mesh axes, how to build the method, what
it does not support, and what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.options import Option, Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.engine.linear.kernels import Kernel
from cp_plugin.engine.linear.tokens import Tokens

Kind = Literal["softmax", "linear"]


class Attend(Protocol):
    """Attention of a query shard over a key/value shard: a kernel, or a method that moves shards between kernels.

    ``None`` means that no query saw any key: there is nothing to merge or add.
    """

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        """Attention over these keys, merged into ``onto``: the same queries' attention over other keys.

        The memory of ``onto`` may be reused: a kernel can accumulate in place instead of merging.
        """
        ...

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        """Gradients of these queries, keys and values, from the dout, lse and delta that ``queries`` carry.

        onto: gradients of the same queries (or keys) over other pairs. The result includes them, and their memory may
        be reused: a kernel can add in place.
        """
        ...


class Scan(Protocol):
    """Linear attention of this rank's segments, which are folded into the batch: b = directions * segments * batch."""

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs ``[t, b, h, e]`` in the accumulation dtype, and what the backward pass needs besides the tokens."""
        ...

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of ``Tokens.differentiable``."""
        ...

    def extend(self, x: Tokens, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        """For generation: outputs of causal tokens, and the state after the last one on every rank.

        initial: the state before the first token, ``[b, g, d, e]``; None: zero.
        """
        ...


Formula = Mapping[tuple[str, str], int]
"""(phase, axis) -> bytes that a rank sends."""


class Choice(NamedTuple):
    """A user's options as completed by a provider."""

    options: Options
    """With everything filled in that the method needs."""
    why: tuple[str, ...] = ()
    """A sentence for each choice made for the user, with its reason, and for what looks like a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A context-parallel method under its public name. All functions but ``choose`` get the options it returned."""

    name: str
    summary: str
    """One line, with the paper."""
    kind: Kind = "softmax"
    """Which attention it computes; the kinds differ in their inner interface (``Attend``, ``Scan``)."""
    layouts: tuple[str, ...]
    """Supported token layouts; the first is the default."""
    build: Callable[..., Any]
    """(mesh, local, problem, options) -> the method: an ``Attend`` on an ``Attend``, or a ``Scan`` on ``Parts``."""
    traffic: Callable[[Problem, Options, int], Formula]
    """Closed formula for the bytes that a rank (by number) sends per call; a test holds it equal to the ledger."""
    axes: Callable[[int, Options], dict[str, int]] = lambda size, options: {"cp": size}
    """(context-parallel size, options) -> mesh axes, slowest first: neighbouring ranks differ in the last one."""
    options: tuple[Option | str, ...] = ()
    """Options besides layout, backend, head_parallel and fp8. Another provider's option may be given by name."""
    choose: Callable[[Problem, Options], Choice] = lambda problem, options: Choice(options)
    """Fill in what the user left open; ValueError for options that do not fit the number of ranks."""
    unsupported: Callable[[Problem, Options], str | None] = lambda problem, options: None
    """Why it cannot do this problem; None if it can."""
    extra_groups: tuple[str, ...] = ()
    """Process groups beyond those of the axes: ``WHOLE``, ``sums(axis)``; see ``engine.comm.axis_groups``."""
    collective_axes: tuple[str, ...] = ()
    """Axes along which it gathers or reduce-scatters; along others ranks send each other messages. Their groups are
    connected accordingly (``engine.comm.connect``); a test holds it equal to what is posted."""
    beside: tuple[str, ...] = ()
    """Axes along which tokens are gathered whole, so that their ranks should hold adjacent tokens."""
    asks_hosts: Callable[[Options], bool] = lambda options: False
    """Whether what the user left open depends on ``Transport.hosts``."""
    asks_heads: Callable[[Options], bool] = lambda options: False
    """Whether it can choose nothing before the numbers of heads are known."""


def with_option(
    inner: Provider,
    option: Option,
    *,
    as_sent: Callable[[Problem, Options], Problem],
    over: Callable[[Mesh, Problem], Mesh],
    refused: Callable[[Problem, Options], str | None],
) -> Provider:
    """A provider with one more option, which changes what travels without its method knowing.

    Args:
        as_sent: the problem that the provider sees: its formula then counts the bytes that travel.
        over: the mesh that the method is built on.
        refused: why the option does not fit a problem; None if it does.
    """

    def build(mesh: Mesh, local: Any, problem: Problem, options: Options) -> Any:
        problem = as_sent(problem, options)
        return inner.build(over(mesh, problem), local, problem, options)

    def traffic(problem: Problem, options: Options, index: int) -> Formula:
        return inner.traffic(as_sent(problem, options), options, index)

    def choose(problem: Problem, options: Options) -> Choice:
        return inner.choose(as_sent(problem, options), options)

    def unsupported(problem: Problem, options: Options) -> str | None:
        return refused(problem, options) or inner.unsupported(as_sent(problem, options), options)

    return replace(
        inner, options=(*inner.options, option), build=build, traffic=traffic, choose=choose, unsupported=unsupported
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the sequence is divided, and by what a rank computes its share."""

    kernel: Kernel
    order: tuple[int, ...]
    """Segment numbers, counted rank by rank, in token order."""
    directions: int = 1
    """1: causal. 2: also from the last token back; each rank's segments then occur twice."""
    uniform: bool = False
    """All segments have the same ``factor``, so it need not travel."""
    segments: int = 1
    """Of each rank; s = segments * t."""

    @staticmethod
    def from_segments(problem: Problem, segments: Sequence[Segments], kernel: Kernel) -> Parts:
        """Make the parts of a layout; segments: the positions of every rank's tokens."""
        length = min(len(s) for rank in segments for s in rank)  # adjacent segments of a rank may have been merged
        numbered = [start for rank in segments for s in rank for start in s[::length]]
        return Parts(
            kernel=kernel,
            order=tuple(sorted(range(len(numbered)), key=lambda i: numbered[i])),
            directions=1 if problem.causal or problem.summed else 2,
            uniform=problem.uniform,
            segments=len(numbered) // len(segments),
        )

    def fold(self, y: Tensor | None, backwards: Tensor | None = None) -> Tensor | None:
        """Token dimension to batch: ``[s, b, ...] -> [t, directions * segments * b, ...]``.

        backwards: replaces y in the second direction.
        """
        if y is None:
            return None
        split = y.unflatten(0, (self.segments, -1)).transpose(0, 1)
        if self.directions == 1:
            return split.flatten(1, 2)
        other = y if backwards is None else backwards
        other = other.unflatten(0, (self.segments, -1)).transpose(0, 1).flip(0)
        return torch.stack((split, other), 1).flatten(1, 3)

    def unfold(self, y: Tensor) -> tuple[Tensor, ...]:
        """The inverse: one tensor ``[s, b, ...]`` per direction."""
        split = y.unflatten(1, (self.directions, self.segments, -1)).unbind(1)
        split = (split[0], *(other.flip(0) for other in split[1:]))
        return tuple(part.transpose(0, 1).flatten(0, 1) for part in split)
