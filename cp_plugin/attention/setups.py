"""Setups: providers with resolved options for one problem, or the reason why they cannot do it.

``cp-plugin traffic`` and ``cp-plugin verify`` run through a list of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cp_plugin.comm import axis_groups
from cp_plugin.common.text import in_words
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.kernels import backends
from cp_plugin.linear.kernels import KERNELS
from cp_plugin.methods import registry as providers
from cp_plugin.methods.gradient_dtype import float32_unless_told
from cp_plugin.methods.protocol import Provider
from cp_plugin.methods.registry import Resolved
from cp_plugin.placement.documents import DOCUMENTS, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup(Resolved):
    """Resolved options, and whether the provider can do the problem."""

    reason: str | None = None
    """Why it cannot (the options are then as given); None if it can."""

    @property
    def layout(self) -> str:
        """The name of the token layout."""
        return self.options.layout or self.provider.layouts[0]

    @property
    def communicators(self) -> int:
        """Process groups per rank; on NCCL each has buffers of its own."""
        return len(axis_groups(range(self.problem.size), self.axes, self.provider.extra_groups))

    def __str__(self) -> str:
        """``grid 8x8, head parallel 2``; values of 1 are left out."""
        chosen = providers.in_order(replace(self.options, layout=None, backend="auto"))
        return ", ".join(f"{name.replace('_', ' ')} {in_words(value)}" for name, value in chosen.items() if value != 1)


def settled(provider: Provider, problem: Problem, options: Options) -> Setup:
    """The provider's setup; on the layout ``documents``, with tokens placed for the problem's documents; ValueError for
    options that do not fit the provider or the number of ranks, as ``providers.settle`` does."""
    if options.layout == DOCUMENTS.name and problem.bounds:
        problem = placed(problem)
    found = providers.settle(provider, problem, options)
    reason = providers.unsupported(found.provider, problem, found.options)
    if reason is None:
        reason = _indivisible(found.provider, problem, found.options)
    return Setup(provider=found.provider, problem=problem, options=found.options, why=found.why, reason=reason)


def settled_or_reason(provider: Provider, problem: Problem, options: Options) -> Setup:
    """``settled``, with options that do not fit as the reason."""
    try:
        return settled(provider, problem, options)
    except ValueError as error:
        return Setup(provider=provider, problem=problem, options=options, reason=str(error))


def with_float32_sums(provider: Provider, problem: Problem, options: Options) -> Setup:
    """``settled_or_reason`` whatever the table of ``--cp-gradient-dtype`` says, to compare methods by their bytes."""
    found = settled_or_reason(provider, problem, float32_unless_told(provider, options))
    return replace(found, options=replace(found.options, gradient_dtype=options.gradient_dtype))


def can_place(provider: Provider, problem: Problem) -> bool:
    """Whether tokens can be placed for the problem's documents on this provider."""
    return DOCUMENTS.name in provider.layouts and bool(problem.bounds) and problem.causal and problem.size > 1


def placed(problem: Problem) -> Problem:
    """The problem on tokens placed for its documents and window."""
    left = problem.mask().left
    lengths = [end - start for start, end in pairwise(problem.bounds)]
    return replace(problem, placed=place(lengths, problem.size, per_host=problem.per_host, left=left).layout)


def setups(chosen: Sequence[str | Provider], problem: Problem, options: Options) -> list[Setup]:
    """A setup for every chosen provider, or for all if none is chosen.

    Each gets the options it has; an option that none of them has is an error. Options that do not fit are an error for
    chosen providers and a reason for others. ValueError for an unknown provider, and as above.
    """
    found = [providers.get(p) if isinstance(p, str) else p for p in chosen or _all(options.backend)]
    for name, value in options.chosen.items():
        if not any(_has(p, name) for p in found):
            providers.settle(found[0], problem, Options(**{name: value}))
    settle = settled if chosen else settled_or_reason
    return [settle(p, problem, options_of(p, options)) for p in found]


def _all(backend: str) -> list[str]:
    """Providers whose kind of attention has that kernel; all for ``auto`` and for unknown names."""
    unknown = backend not in (*backends.names(), *KERNELS)
    softmax = providers.names() if unknown or backend in backends.names() else []
    linear = providers.names("linear") if unknown or backend in ("auto", *KERNELS) else []
    return [*softmax, *linear]


def options_of(provider: Provider, options: Options) -> Options:
    """The options that the provider has."""
    return replace(options, **{name: None for name in options.chosen if not _has(provider, name)})


def _has(provider: Provider, name: str) -> bool:
    return name in provider.options or (name in providers.ANY_SOFTMAX and provider.kind == "softmax")


def _indivisible(provider: Provider, problem: Problem, options: Options) -> str | None:
    try:
        providers.layout_for(provider, options).segments(problem.seq_length, problem.size, 0)
    except ValueError as error:
        return str(error)
    return None
