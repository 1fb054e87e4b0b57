"""The interfaces everything is composed of.

**A context-parallel method has the same interface as the attention kernel it distributes** (``Attend``), so methods
wrap kernels, and each other. A ``Provider`` is what a method file registers: a name, its mesh axes, how to build it,
what it cannot do and what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from cp_plugin.core.options import Option, Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.linear.segment import Tokens
from cp_plugin.placement.documents import Cut

Kind = Literal["softmax", "linear"]


class Attend(Protocol):
    """Attention of a query shard over a key/value shard: one kernel, or a method that moves shards between kernels.

    ``None`` means that no query has seen any key: there is nothing to merge or to add.
    """

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        """Attention over these keys, merged with ``onto``: attention of the same queries over other keys, whose memory
        may be reused. A kernel can go on from it, which spares the merging."""
        ...

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        """Gradients of these queries, keys and values, from what ``queries`` bring: dout, lse and delta.

        onto: sums of the same queries' (or keys') gradients over other pairs, whose memory may be reused. What is
        returned includes them: a kernel can add to the rows it has, which spares a gradient of zeros elsewhere.
        """
        ...


class Parts(Protocol):
    """What a method for linear attention is built around: the segments of all ranks, and the kernel for this rank's."""

    order: tuple[int, ...]
    """Where in the sequence the segments follow each other: numbers of segments, rank by rank, in token order."""
    directions: int
    """1: from the first token on (causal). 2: also from the last one back; each rank's segments are there twice."""
    uniform: bool
    """All segments have the same ``through``: it need not travel."""
    cuts: tuple[tuple[Cut, ...], ...] | None
    """On placed tokens: the pieces of documents that are cut. A rank then has one segment, of all its pieces, in which
    nothing goes on from one piece to the next. None: on others."""
    pieces: Tensor | None
    """bool ``[t]``: the tokens of this rank with which pieces begin; None as above."""
    forward: Callable[[Tokens], Tensor]
    """Outputs of every segment from a state of zero."""
    backward: Callable[[Tensor, Tokens], tuple[Tensor, ...]]
    """dout and the tokens -> gradients of q, k, v and, where there is one, the log decay."""


class Scan(Protocol):
    """Linear attention of this rank's segments, which are part of the batch: b = directions * segments * batch."""

    def forward(self, x: Tokens) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs ``[t, b, h, e]`` in the accumulation dtype, and what the backward needs besides the tokens."""
        ...

    def backward(self, dout: Tensor, x: Tokens, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and, where there is one, the log decay."""
        ...


Formula = Mapping[tuple[str, str], int]
"""(phase, axis) -> bytes a rank sends."""


class Choice(NamedTuple):
    """What a provider made of a user's options."""

    options: Options
    """With all that the method needs filled in."""
    why: tuple[str, ...] = ()
    """A sentence for each choice that was made for the user, with its reason, and for what looks like a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A context-parallel method under the name users give. Method files list theirs in ``PROVIDERS``.

    All functions but ``choose`` are given the options that ``choose`` returned.
    """

    name: str
    summary: str
    """One line, with the paper."""
    kind: Kind = "softmax"
    """What it computes. Softmax and linear attention have different interfaces inside (``Attend``, ``Scan``)."""
    layouts: tuple[str, ...]
    """Token layouts it supports; the first is the default."""
    axes: Callable[[int, Options], dict[str, int]]
    """(context-parallel size, options) -> mesh axes, slowest first: neighbouring ranks differ in the last one."""
    build: Callable[..., Any]
    """(mesh, what is local, problem, options) -> the method: ``Attend`` on ``Attend``, or ``Scan`` on ``Parts``."""
    traffic: Callable[[Problem, Options, int], Formula]
    """The closed formula for the bytes a rank (by its number) sends per call; a test holds it equal to the ledger."""
    options: tuple[Option | str, ...] = ()
    """Those that it has besides layout, backend, head_parallel and fp8. One that another provider declares may be given
    by its name."""
    choose: Callable[[Problem, Options], Choice] = lambda problem, options: Choice(options)
    """Fill in what the user left open; ValueError for options that do not fit the number of ranks."""
    unsupported: Callable[[Problem, Options], str | None] = lambda problem, options: None
    """The reason why it cannot do this problem, or None."""
    extra_groups: tuple[str, ...] = ()
    """Process groups beside those of the axes: ``WHOLE``, ``sums(axis)``; see ``cp_plugin.comm.axis_groups``."""
    beside: tuple[str, ...] = ()
    """Axes whose ranks hold tokens that lie side by side, because they are brought together whole."""
    asks_hosts: bool = False
    """Whether its choices depend on ``Problem.hosts``."""
    asks_heads: Callable[[Options], bool] = lambda options: False
    """Whether nothing can be chosen before the numbers of heads are known."""
