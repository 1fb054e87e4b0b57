"""The provider registry: every method in ``engine.methods`` and every third-party entry point.

A third party adds a method in a module of its own that builds a ``Provider``, and in its pyproject.toml:

    [project.entry-points."cp_plugin.providers"]
    mymethod = "my_package.my_module:PROVIDER"
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from cp_plugin.engine import methods
from cp_plugin.engine.common.names import not_one_of
from cp_plugin.engine.common.plugins import with_entry_points
from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.core.options import AUTO, Option, Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.linear.kernels import KERNELS
from cp_plugin.engine.methods import fp8
from cp_plugin.engine.methods.gradient_dtype import GRADIENT_DTYPE
from cp_plugin.engine.methods.head_axis import HEAD_PARALLEL, with_head_axis
from cp_plugin.engine.methods.protocol import Kind, Provider
from cp_plugin.engine.placement.documents import ALL, get_layout

ENTRY_POINTS = "cp_plugin.providers"
LAYOUT = Option(
    "layout",
    metavar="NAME",
    meaning=f"which tokens each rank holds: {', '.join(ALL)}",
    default="the provider's first layout",
)
ANY_SOFTMAX = (HEAD_PARALLEL, fp8.FP8)
"""Options of every provider of softmax attention."""


class Registry(dict[str, Provider]):
    """name -> provider."""

    @cached_property
    def options(self) -> dict[str, Option]:
        """name -> option: layout, kernel, and the options of all providers; ValueError if an option is declared twice,
        or used without a declaration."""
        many = (*ANY_SOFTMAX, GRADIENT_DTYPE)
        backend = Option(
            "backend",
            metavar="NAME",
            meaning=f"attention kernel: {', '.join(backends.names())}; for linear layers: {', '.join(KERNELS)}",
            default="the fastest that runs here",
        )
        declared: dict[str, Option] = {LAYOUT: LAYOUT, backend: backend}
        having = [(option, provider.name) for provider in self.values() for option in provider.options]
        for option, name in having:
            if isinstance(option, Option) and option not in many and declared.setdefault(option, option) is not option:
                raise ValueError(f"provider {name!r} declares the option {option!r}, which already exists")
        declared |= {option: option for option in many}
        for option, name in having:
            if option not in declared:
                raise ValueError(f"provider {name!r} has the option {option!r}, which no provider declares")
        return declared


@cache
def registry() -> Registry:
    """name -> provider, built-in ones first; ValueError if two providers share a name, or an entry point does not lead
    to a ``Provider``."""
    files = sorted(module.name for module in pkgutil.iter_modules(methods.__path__))
    modules = (importlib.import_module(f"{methods.__name__}.{name}") for name in files)
    return Registry(
        with_entry_points(
            ENTRY_POINTS,
            (provider for module in modules for provider in getattr(module, "PROVIDERS", ())),
            fits=lambda loaded: isinstance(loaded, Provider),
            one="a cp_plugin Provider",
            many="context-parallel providers",
        )
    )


def names(kind: Kind = "softmax") -> list[str]:
    """Names of all providers of softmax, or of linear, attention."""
    return [name for name, provider in registry().items() if provider.kind == kind]


def get(provider: str | Provider) -> Provider:
    """The provider, or that of this name; ValueError, which lists the valid names, if there is none."""
    if not isinstance(provider, Provider) and provider not in registry():
        raise ValueError(not_one_of(spelled("provider", provider), provider, registry()))
    return provider if isinstance(provider, Provider) else registry()[provider]


def order_choices(options: Options) -> dict[Option, Any]:
    """Return what was chosen, including layout and kernel, in order of declaration."""
    chosen = {"layout": options.layout, **options.chosen}
    if options.backend != AUTO:
        chosen["backend"] = options.backend
    return {option: chosen[name] for name, option in registry().options.items() if chosen.get(name) is not None}


def takers(option: str) -> list[str]:
    """Providers of softmax attention that take an option."""
    return [name for name in names() if takes(get(name), option)]


def takes(provider: Provider, option: str) -> bool:
    """Return True if an option means something to a provider."""
    if option in ("layout", "backend"):
        return True
    if option != HEAD_PARALLEL:
        return option in provider.options or (option in ANY_SOFTMAX and provider.kind == "softmax")
    try:  # in front of any provider that does not divide the heads itself
        settle(provider, Problem(size=2, heads=2, kv_heads=2), Options(head_parallel=2))
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A provider and its completed options: resolved once, nothing that takes one chooses again."""

    provider: Provider
    """With a head axis in front, if one was asked for."""
    problem: Problem
    """The problem it chose by."""
    options: Options
    """With everything filled in that the provider needs."""
    why: tuple[str, ...] = ()
    """Choices made for the user with their reasons, and warnings; a sentence each."""

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axes, slowest first."""
        return self.provider.axes(self.problem.size, self.options)


def settle(provider: str | Provider, problem: Problem, options: Options) -> Resolved:
    """Check a user's options and let the provider fill in the open ones; ValueError for an unknown name, an option the
    provider does not have, or one that does not fit the ranks."""
    method = get(provider)
    declared = registry().options | {option: option for option in method.options if isinstance(option, Option)}
    unused = []
    for name, value in options.chosen.items():
        if name not in declared:
            raise ValueError(not_one_of(f"unknown option {name}", name, sorted(declared)))
        option = declared[name]
        if name not in ANY_SOFTMAX and name not in method.options:
            having = sorted(p.name for p in registry().values() if name in p.options)
            unused.append(option.unused(value, method.name, having))
        else:
            option.check(value)
    if unused:
        raise ValueError(" | ".join(unused))
    for option, because in (
        (HEAD_PARALLEL, "the state of linear attention is small enough to be sent whole"),
        (fp8.FP8, "linear attention sends its states in float32"),
    ):
        if method.kind == "linear" and option in options.chosen:
            raise ValueError(
                f"{spelled(option, options.chosen[option])} has no effect with {method.name}: {because}; leave it out"
            )
    fp8.check(options)
    if options.head_parallel is not None and HEAD_PARALLEL not in method.options:
        method = with_head_axis(method)
    if options.fp8 is not None and fp8.FP8 not in method.options:
        method = fp8.with_payloads(method)
    layout_for(method, options)
    chosen = method.choose(problem, options)
    return Resolved(provider=method, problem=problem, options=chosen.options, why=chosen.why)


def unsupported(provider: Provider, problem: Problem, options: Options) -> str | None:
    """Return why a provider cannot do this problem; None if it can."""
    if provider.kind == "linear":
        if problem.window is not None:
            return "linear attention has no sliding window: its decays do that job"
        if problem.sink:
            return "linear attention has no softmax for a sink to add a score to"
    return provider.unsupported(problem, options)


def layout_for(provider: Provider, options: Options) -> Layout:
    """The requested token layout, or the provider's default; ValueError if it does not exist or is not supported."""
    layout = get_layout(options.layout or provider.layouts[0])
    check_layout(provider, layout)
    return layout


def check_layout(provider: Provider, layout: Layout) -> None:
    """ValueError, which lists the valid ones, for a layout that the provider does not support."""
    if layout.name not in provider.layouts:
        raise ValueError(
            f"provider {provider.name!r} does not run on the {layout.name} layout: use "
            f"{spelled(LAYOUT, *provider.layouts)}"
        )
