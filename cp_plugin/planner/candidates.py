"""All ways to compute one attention call in parallel: providers with all their options, and Megatron's own methods."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from cp_plugin.attention.setups import Setup, can_place, settled_or_reason
from cp_plugin.comm import Mesh, TraceMesh, sums
from cp_plugin.core.layout import LAYOUTS
from cp_plugin.core.options import Option, Options
from cp_plugin.core.problem import Fp8, Problem
from cp_plugin.core.text import in_words
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Provider
from cp_plugin.methods.ulysses import heads_do_not_divide
from cp_plugin.placement import layouts
from cp_plugin.placement.documents import DOCUMENTS
from cp_plugin.planner.packs import in_each

_BASELINES = ("linear_ring",)
"""Never a choice: quadratic work for linear attention."""
_SPARSE = ("needed",)
"""A choice where a window or documents leave keys unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A method with all its options."""

    name: str
    """The provider's, or ``upstream`` and Megatron's name."""
    setup: Setup
    flags: str
    """What to write on Megatron's command line."""

    @property
    def upstream(self) -> bool:
        """Whether it is Megatron's own."""
        return self.name.startswith("upstream")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What may be chosen, where not everything may be."""

    options: Options = field(default_factory=Options)
    """Choices that are made already. Of ours only: Megatron's own methods do not have them."""
    layouts: Sequence[str] = tuple(layouts.ALL)
    """Token layouts of ours."""
    suits: Callable[[Candidate], bool] = lambda candidate: True
    """Whether one may be chosen, beyond that."""


ALL = Allowed()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upstream:
    """Megatron's own methods, each as one of ours that moves the same: all on zigzag tokens."""

    comm_type: str
    provider: str
    options: Options
    windows: bool = False
    """Whether Transformer Engine has it with sliding windows."""
    sinks: bool = False
    """And with one more score in the softmax."""
    heads_over: Callable[[Problem], int] = lambda problem: 1
    """Ranks of its all-to-all. It does not repeat key/value heads: they must divide, as query heads must."""

    @property
    def name(self) -> str:
        return f"upstream {self.comm_type}"

    def can(self, problem: Problem) -> bool:
        ranks = self.heads_over(problem)
        divides = problem.heads % ranks == 0 and problem.kv_heads % ranks == 0
        return divides and (self.windows or problem.window is None) and (self.sinks or not problem.sink)

    def flags(self, setup: Setup) -> str:
        shared = setup.options.head_parallel
        sizes = (
            "" if shared is None else f" --hierarchical-context-parallel-sizes {shared} {setup.problem.size // shared}"
        )
        return f"--cp-comm-type {self.comm_type}{sizes}"


_UPSTREAM = (
    _Upstream(comm_type="p2p", provider="ring", options=Options(layout="zigzag")),
    _Upstream(
        comm_type="all_gather", provider="all_gather", options=Options(layout="zigzag", head_groups=1), windows=True
    ),
    _Upstream(
        comm_type="a2a",
        provider="ulysses",
        options=Options(layout="zigzag"),
        windows=True,
        sinks=True,
        heads_over=lambda problem: problem.size,
    ),
)
_BOTH = _Upstream(comm_type="a2a+p2p", provider="usp", options=Options(layout="zigzag"))


def candidates(
    problem: Problem, fp8: Sequence[Fp8 | None] = (None,), allowed: Allowed = ALL
) -> dict[str, list[Candidate]]:
    """Name -> its candidates that can do the problem; those that send FP8 only where asked for."""
    kind = "linear" if problem.decay != "none" else "softmax"
    found = {
        name: [
            c
            for options in _options(providers.get(name), problem, fp8, allowed)
            if (c := _ours(name, problem, options))
        ]
        for name in providers.names(kind)
        if name not in _BASELINES and (name not in _SPARSE or problem.window is not None or problem.documents)
    }
    if kind == "softmax" and problem.size > 1:
        theirs = in_each(problem) if problem.bounds else problem
        for upstream in (*_UPSTREAM, *_both(problem)):
            setup = settled_or_reason(providers.get(upstream.provider), theirs, upstream.options)
            if setup.reason is None and upstream.can(problem):
                one = Candidate(name=upstream.name, setup=setup, flags=upstream.flags(setup))
                found.setdefault(upstream.name, []).append(one)
    return {name: [c for c in _distinct(some) if allowed.suits(c)] for name, some in found.items()}


def upstream_names(problem: Problem) -> set[str]:
    """Of Megatron's own methods, those that can do the problem's windows, sinks and numbers of heads."""
    return {upstream.name for upstream in (*_UPSTREAM, *_both(problem)) if upstream.can(problem)}


def linear_candidates(problem: Problem) -> list[Candidate]:
    """Of linear attention, with or without decay."""
    names = [name for name in providers.names("linear") if name not in _BASELINES]
    return [c for n in names for o in _options(providers.get(n), problem, (None,), ALL) if (c := _ours(n, problem, o))]


def refusals(problem: Problem) -> Mapping[str, str]:
    """Provider -> why it cannot do the problem at all, whatever its options."""
    found = {}
    for name in providers.names("softmax"):
        setup = settled_or_reason(providers.get(name), problem, Options())
        if setup.reason is not None:
            found[name] = setup.reason
    return found


def as_flags(setup: Setup) -> str:
    """What switches it on in a training: ``--cp-provider attention2d --cp-layout zigzag --cp-grid 8x8``."""
    linear = setup.provider.kind == "linear"  # its layout is that of the softmax layers, too
    chosen = providers.in_order(replace(setup.options, layout=None if linear else setup.layout, backend="auto"))
    flags = [f"{option.flag} {in_words(value)}" for option, value in chosen.items()]
    return " ".join([f"--cp-{'linear-' * linear}provider {setup.provider.name}", *flags])


def _ours(name: str, problem: Problem, options: Options) -> Candidate | None:
    setup = settled_or_reason(providers.get(name), problem, options)
    return None if setup.reason is not None else Candidate(name=name, setup=setup, flags=as_flags(setup))


def _both(problem: Problem) -> Iterator[_Upstream]:
    """Upstream's two levels: heads inside, a ring outside."""
    for ranks in _divisors(problem.size)[1:-1]:
        options = replace(_BOTH.options, head_parallel=ranks)
        yield replace(_BOTH, options=options, heads_over=lambda _, ranks=ranks: ranks)


def variants(candidate: Candidate, allowed: Allowed = ALL) -> list[Candidate]:
    """The same with one choice made otherwise: what is worth a try once the large ones are made."""
    if candidate.upstream or candidate.setup.provider.kind == "linear":
        return []
    problem, options = replace(candidate.setup.problem, placed=None), candidate.setup.options
    provider, ranks = providers.get(candidate.name), problem.size // (options.head_parallel or 1)
    told = {option: option.near(ranks, getattr(options, option)) for option in providers.registry().options.values()}
    uneven = ("contiguous",) if problem.causal and problem.window is None else ()
    others = [name for name in _layouts(provider, problem, allowed) if name not in (candidate.setup.layout, *uneven)]
    changes: list[dict[str, object]] = [{"layout": name} for name in others]
    free = [option for option in provider.options if option not in allowed.options.chosen]
    changes += [{option: v} for option in free for v in told[option] if v != getattr(options, option)]
    own = {option: None for option in told if told[option] and option not in provider.options}
    asked = [replace(options, **{**own, **change}) for change in changes]  # type: ignore[arg-type]
    found = _distinct([c for o in asked if (c := _ours(candidate.name, problem, o)) is not None])
    return [c for c in found if allowed.suits(c)]


def _options(provider: Provider, problem: Problem, fp8: Sequence[Fp8 | None], allowed: Allowed) -> Iterator[Options]:
    """The large choices: how many ranks share heads, and the grid. The provider makes the others."""
    made = without_sums(provider, allowed.options)
    sends: Sequence[Fp8 | None] = [None] if provider.kind != "softmax" else [made.fp8] if made.fp8 is not None else fp8
    axes = [made.head_parallel] if made.head_parallel is not None else _axes(provider, problem)
    possible = _layouts(provider, problem, allowed)
    tried = [name for name in possible if name in (possible[0], DOCUMENTS.name)]
    for layout, shared, sent in itertools.product(tried, axes, sends):
        ranks = problem.size // (shared or 1)
        spanned = [o for o in providers.registry().options.values() if o.every is not None and o in provider.options]
        for values in itertools.product(*(_values(option, made, ranks) for option in spanned)):
            own = dict(zip(spanned, values, strict=True))
            yield replace(made, layout=layout, head_parallel=shared, fp8=sent, **own)


def _layouts(provider: Provider, problem: Problem, allowed: Allowed) -> list[str]:
    """Those that the provider runs on. For packed documents its first, and the one that is made for them: the others
    know nothing of documents either, and striped tokens make a tile of almost every pair of them."""
    found = [name for name in provider.layouts if name in allowed.layouts]
    if not problem.bounds:
        return [name for name in found if name in LAYOUTS] or found
    regular = [name for name in found if name in LAYOUTS and not LAYOUTS[name].cyclic]
    return regular[:1] + [DOCUMENTS.name] * (DOCUMENTS.name in found and can_place(provider, problem))


def without_sums(provider: Provider, options: Options) -> Options:
    """The options without the dtype of gradients' sums where there are none: it is no reason to choose another one."""
    return options if "gradient_dtype" in provider.options else replace(options, gradient_dtype=None)


def _values(option: Option, made: Options, ranks: int) -> Sequence[Any]:
    """The one that was chosen, or all that there are."""
    chosen = getattr(made, option)
    if chosen is not None or option.every is None:
        return [chosen]
    return option.every(ranks)


def _axes(provider: Provider, problem: Problem) -> list[int | None]:
    """Head axes in front of a provider; none where it divides the heads itself."""
    if provider.kind == "linear":
        return [None]
    alone = settled_or_reason(provider, problem, Options(head_parallel=1)).reason
    if alone is not None and "divides the heads" in alone:
        return [None]
    return [None if ranks == 1 and "head_parallel" not in provider.options else ranks for ranks in _head_axes(problem)]


def _head_axes(problem: Problem) -> list[int]:
    return [n for n in _divisors(problem.size) if heads_do_not_divide(problem, n, "") is None]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _distinct(found: Sequence[Candidate]) -> list[Candidate]:
    """One of those with the same choices made."""
    return list({(c.setup.layout, c.setup.options): c for c in found}.values())


def composition(setup: Setup) -> tuple[object, ...]:
    """What a method is composed of, whatever its name and those of its axes.

    Equal for setups that make the same moves on the same axes, with the same tokens on every rank.
    """
    provider, problem = setup.provider, setup.problem
    if provider.kind != "softmax":
        return provider.name, setup.layout, setup.options
    axes = provider.axes(problem.size, setup.options)
    method = provider.build(TraceMesh(axes, 0), _Kernel(), problem, setup.options)
    beside = tuple(n for name, n in axes.items() if name in provider.beside)
    apart = tuple(n for name, n in axes.items() if sums(name) in provider.extra_groups and n > 1)
    sizes = tuple(n for n in axes.values() if n > 1)
    return setup.layout, sizes, beside, apart, _parts(method, axes), setup.options.fp8, problem


class _Kernel:
    """What a method is built around, here."""


def _parts(part: object, axes: dict[str, int]) -> object:
    if isinstance(part, Mesh):
        return type(part).__name__
    if isinstance(part, _Kernel):
        return "kernel"
    if isinstance(part, str):
        return axes.get(part, part)
    if isinstance(part, tuple):
        return tuple(_parts(one, axes) for one in part)
    if is_dataclass(part):
        return type(part).__name__, *(_parts(getattr(part, f.name), axes) for f in fields(part))
    return part
