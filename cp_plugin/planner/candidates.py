"""Candidates: every provider with all its options, and Megatron's own context-parallel methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cp_plugin.engine.attention.calls import Setup, can_place, settled_or_reason, with_float32_sums
from cp_plugin.engine.common.text import divisors, show_option
from cp_plugin.engine.core.layout import LAYOUTS
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Fp8, Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Provider
from cp_plugin.engine.methods.ulysses import heads_do_not_divide
from cp_plugin.engine.placement import documents
from cp_plugin.engine.placement.documents import DOCUMENTS
from cp_plugin.planner import stock_rules
from cp_plugin.planner.packs import divide_each

_BASELINES = ("linear_ring",)
"""Never chosen: quadratic work for linear attention."""
STOCK = "stock"
"""Stock Megatron without context parallelism; with it, followed by its ``--cp-comm-type``."""
DEFAULT = f"{STOCK} p2p"
"""Megatron's default."""
_ALONE = "all_gather"
"""On one rank it is the kernel alone."""
_SPARSE = ("needed",)
"""Considered only where a window or documents leave keys unseen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A method with all options resolved."""

    name: str
    """The provider, or ``stock`` and Megatron's ``--cp-comm-type``."""
    setup: Setup
    flags: str
    """Megatron flags that select it."""

    @property
    def upstream(self) -> bool:
        return self.name.startswith(STOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Restrictions on the search."""

    options: Options = field(default_factory=Options)
    """Options fixed in advance; Megatron's own methods do not have them."""
    layouts: Sequence[str] = tuple(documents.ALL)
    """Token layouts of our providers."""
    real: Problem | None = None
    """An attention call of the training, with what is not priced: sinks, documents of unknown lengths."""
    stock: bool = True
    """Whether stock Megatron can run this at all."""
    refused: str = ""
    """Why none of our providers can; empty: some may."""

    def select(self, some: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates that satisfy all of this."""
        theirs = set() if not self.stock else upstream_names(self.real) if self.real is not None else None
        return [c for c in some if self._can(c, theirs)]

    def _can(self, candidate: Candidate, theirs: set[str] | None) -> bool:
        if candidate.upstream:
            return theirs is None or candidate.name in theirs
        setup = candidate.setup
        return not self.refused and (
            self.real is None or providers.unsupported(setup.provider, self.real, setup.options) is None
        )


ALL = Allowed()


def _upstream(problem: Problem) -> Iterator[tuple[str, str, Options]]:
    """Megatron's methods that support the problem's mask and head counts.

    Each is a ``--cp-comm-type``, and the provider of ours that moves the same data on zigzag tokens, with its options.
    Transformer Engine does not replicate KV heads: all-to-all must divide them, too.
    """
    zigzag = Options(layout="zigzag")
    for comm_type, provider, options, head_ranks in (
        ("p2p", "ring", zigzag, 1),
        ("all_gather", "all_gather", replace(zigzag, head_groups=1), 1),
        ("a2a", "ulysses", zigzag, problem.size),
        *(("a2a+p2p", "usp", replace(zigzag, head_parallel=n), n) for n in divisors(problem.size)[1:-1]),
    ):
        divides = problem.heads % head_ranks == 0 and problem.kv_heads % head_ranks == 0
        if divides and stock_rules.can(comm_type, problem):
            yield comm_type, provider, options


def upstream_names(problem: Problem) -> set[str]:
    """Names of Megatron's methods that support the problem's mask and head counts."""
    if problem.size == 1:
        return {STOCK}
    return {f"{STOCK} {comm_type}" for comm_type, *_ in _upstream(problem)}


def candidates(
    problem: Problem, fp8: Sequence[Fp8 | None] = (None,), allowed: Allowed = ALL
) -> dict[str, list[Candidate]]:
    """Name -> the candidates for softmax attention that support the problem.

    fp8: payload formats to consider; None: the model's dtype.
    """
    sparse = problem.window is not None or problem.documents
    names = [name for name in providers.names() if sparse or name not in _SPARSE]
    by_name = {name: _supported(name, problem, _options(providers.get(name), problem, fp8, allowed)) for name in names}
    if problem.size == 1:
        alone = settled_or_reason(providers.get(_ALONE), problem, Options())
        by_name[STOCK] = [Candidate(name=STOCK, setup=alone, flags="")]
    else:
        theirs = divide_each(problem) if problem.bounds else problem
        for comm_type, provider, options in _upstream(problem):
            setup = with_float32_sums(providers.get(provider), theirs, options)  # priced as sent later
            if setup.reason is None:
                shared = setup.options.head_parallel
                sizes = f" --hierarchical-context-parallel-sizes {shared} {theirs.size // shared}" if shared else ""
                name, flags = f"{STOCK} {comm_type}", f"--cp-comm-type {comm_type}{sizes}"
                by_name.setdefault(name, []).append(Candidate(name=name, setup=setup, flags=flags))
    return {name: allowed.select(_distinct(some)) for name, some in by_name.items()}


def linear_candidates(problem: Problem) -> list[Candidate]:
    """Candidates for linear attention, with or without decay."""
    names = [name for name in providers.names("linear") if name not in _BASELINES]
    return [c for n in names for c in _supported(n, problem, _options(providers.get(n), problem, (None,), ALL))]


def refusals(problem: Problem) -> Mapping[str, str]:
    """Softmax provider -> why it cannot run the problem with any options."""
    setups = {name: settled_or_reason(providers.get(name), problem, Options()) for name in providers.names("softmax")}
    return {name: setup.reason for name, setup in setups.items() if setup.reason is not None}


def as_flags(setup: Setup) -> str:
    """Megatron flags for a setup: ``--cp-provider attention2d --cp-layout zigzag --cp-grid 8x8``."""
    linear = setup.provider.kind == "linear"  # shares the layout of the softmax layers
    chosen = providers.order_choices(replace(setup.options, layout=None if linear else setup.layout, backend="auto"))
    flags = [f"{option.flag} {show_option(value)}" for option, value in chosen.items()]
    return " ".join([f"--cp-{'linear-' * linear}provider {setup.provider.name}", *flags])


def variants(candidate: Candidate, allowed: Allowed = ALL) -> list[Candidate]:
    """Candidates that differ in one minor option: worth a try once grid and head axis are chosen."""
    if candidate.upstream or candidate.setup.provider.kind == "linear":
        return []
    problem, options = replace(candidate.setup.problem, placed=None), candidate.setup.options
    provider, ranks = providers.get(candidate.name), problem.size // (options.head_parallel or 1)
    options = replace(options, gradient_dtype=without_sums(provider, allowed.options).gradient_dtype)
    told = {option: option.near(ranks, getattr(options, option)) for option in providers.registry().options.values()}
    uneven = ("contiguous",) if problem.causal and problem.window is None else ()
    others = [name for name in _layouts(provider, problem, allowed) if name not in (candidate.setup.layout, *uneven)]
    changes: list[dict[str, object]] = [{"layout": name} for name in others]
    free = [option for option in provider.options if option not in allowed.options.chosen]
    changes += [{option: v} for option in free for v in told[option] if v != getattr(options, option)]
    own = {option: None for option in told if told[option] and option not in provider.options}
    changed = [replace(options, **{**own, **change}) for change in changes]  # type: ignore[arg-type]
    return allowed.select(_distinct(_supported(candidate.name, problem, changed)))


def without_sums(provider: Provider, options: Options) -> Options:
    """Drop ``gradient_dtype`` for providers that sum no gradients: it is no reason to prefer another one."""
    return options if "gradient_dtype" in provider.options else replace(options, gradient_dtype=None)


def _supported(name: str, problem: Problem, options: Iterator[Options] | Sequence[Options]) -> list[Candidate]:
    setups = (settled_or_reason(providers.get(name), problem, one) for one in options)
    return [Candidate(name=name, setup=s, flags=as_flags(s)) for s in setups if s.reason is None]


def _options(provider: Provider, problem: Problem, fp8: Sequence[Fp8 | None], allowed: Allowed) -> Iterator[Options]:
    """The major options: layout, head axis, FP8 and grid. The provider resolves the rest."""
    made = without_sums(provider, allowed.options)
    sends: Sequence[Fp8 | None] = [None] if provider.kind != "softmax" else [made.fp8] if made.fp8 is not None else fp8
    axes = [made.head_parallel] if made.head_parallel is not None else _axes(provider, problem)
    possible = _layouts(provider, problem, allowed)
    tried = [name for name in possible if name in (possible[0], DOCUMENTS.name)]
    for layout, shared, sent in itertools.product(tried, axes, sends):
        ranks = problem.size // (shared or 1)
        spanned = [o for o in providers.registry().options.values() if o.every is not None and o in provider.options]
        chosen = [getattr(made, option) for option in spanned]
        every = (option.every(ranks) if x is None else [x] for option, x in zip(spanned, chosen, strict=True))
        for values in itertools.product(*every):
            own = dict(zip(spanned, values, strict=True))
            yield replace(made, layout=layout, head_parallel=shared, fp8=sent, **own)


def _layouts(provider: Provider, problem: Problem, allowed: Allowed) -> list[str]:
    """Layouts to consider. For packed documents the provider's first regular one and the one placed for them.

    Other regular layouts ignore documents as well, and striped tokens make a tile of almost every pair of them.
    """
    possible = [name for name in provider.layouts if name in allowed.layouts]
    if not problem.bounds:
        return [name for name in possible if name in LAYOUTS] or possible
    regular = [name for name in possible if name in LAYOUTS and not LAYOUTS[name].cyclic]
    return regular[:1] + [DOCUMENTS.name] * (DOCUMENTS.name in possible and can_place(provider, problem))


def _axes(provider: Provider, problem: Problem) -> list[int | None]:
    """Head-axis sizes in front of a provider; none where it divides the heads itself."""
    if provider.kind == "linear":
        return [None]
    alone = settled_or_reason(provider, problem, Options(head_parallel=1)).reason
    if alone is not None and "divides the heads" in alone:
        return [None]
    sizes = [n for n in divisors(problem.size) if heads_do_not_divide(problem, n) is None]
    return [None if ranks == 1 and "head_parallel" not in provider.options else ranks for ranks in sizes]


def _distinct(some: Sequence[Candidate]) -> list[Candidate]:
    """One candidate per resolved layout and options."""
    return list({(c.setup.layout, c.setup.options): c for c in some}.values())
