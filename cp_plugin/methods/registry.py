"""The provider registry: every method in ``cp_plugin.methods`` and every third-party entry point.

A third party adds a method without touching this package: a module that builds a ``Provider``, and in its pyproject

    [project.entry-points."cp_plugin.providers"]
    mymethod = "my_package.my_module:PROVIDER"
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import NamedTuple

from cp_plugin import methods
from cp_plugin.core.layout import Layout, get_layout
from cp_plugin.core.problem import Options, Problem
from cp_plugin.core.text import in_words
from cp_plugin.methods import fp8, gradient_dtype
from cp_plugin.methods.head_axis import with_head_axis
from cp_plugin.methods.protocol import Kind, Provider

ENTRY_POINTS = "cp_plugin.providers"
ANY_SOFTMAX = ("head_parallel", "fp8")
"""Fields of ``Options`` for every provider of softmax attention."""


@cache
def registry() -> dict[str, Provider]:
    """name -> provider, built-in ones first.

    Raises:
        ValueError: if two providers share a name, or an entry point does not lead to a ``Provider``.
    """
    found: dict[str, Provider] = {}
    for module in sorted(pkgutil.iter_modules(methods.__path__), key=lambda m: m.name):
        for provider in getattr(importlib.import_module(f"{methods.__name__}.{module.name}"), "PROVIDERS", ()):
            _register(found, provider, f"{methods.__name__}.{module.name}")
    for point in entry_points(group=ENTRY_POINTS):
        provider = point.load()
        if not isinstance(provider, Provider):
            raise ValueError(f"entry point {point.name!r} = {point.value!r} is not a cp_plugin Provider")
        _register(found, provider, point.value)
    return found


def names(kind: Kind = "softmax") -> list[str]:
    """The names of all providers of softmax, or of linear, attention."""
    return [name for name, provider in registry().items() if provider.kind == kind]


def get(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ValueError: if there is none; the message lists the valid names.
    """
    found = registry()
    if name not in found:
        raise ValueError(f"unknown provider {name!r}: --cp-provider must be one of {', '.join(found)}")
    return found[name]


class Settled(NamedTuple):
    """A provider and all that was chosen for it."""

    provider: Provider
    """With a head axis in front, if one was asked for."""
    options: Options
    why: tuple[str, ...]
    """What was chosen for the user and the reason, and warnings; a sentence each."""


def settle(provider: str | Provider, problem: Problem, options: Options) -> Settled:
    """Check a user's options, and fill in what they left open.

    Raises:
        ValueError: for an unknown name, an option that the provider does not have, or one that does not fit the number
            of ranks.
    """
    found = get(provider) if isinstance(provider, str) else provider
    for name, value in options.chosen.items():
        if name not in ANY_SOFTMAX and name not in found.options:
            have = sorted(p.name for p in registry().values() if name in p.options)
            raise ValueError(
                f"{_flag(name)} {in_words(value)} does nothing with --cp-provider {found.name}: leave "
                f"it out, or use {' or '.join(have)}"
            )
    if options.head_parallel is not None and found.kind == "linear":
        raise ValueError(
            f"{_flag('head_parallel')} {options.head_parallel} does nothing with {found.name}: the state of linear "
            "attention is small enough to be sent whole; leave it out"
        )
    if options.fp8 is not None and found.kind == "linear":
        raise ValueError(
            f"{_flag('fp8')} {options.fp8} does nothing with {found.name}: linear attention sends its states in "
            "float32; leave it out"
        )
    fp8.check(options)
    gradient_dtype.check(options)
    if options.head_parallel is not None and "head_parallel" not in found.options:
        found = with_head_axis(found)
    if options.fp8 is not None and "fp8" not in found.options:
        found = fp8.with_payloads(found)
    layout_for(found, options)
    chosen = found.choose(problem, options)
    return Settled(found, chosen.options, chosen.why)


def unsupported(provider: Provider, problem: Problem, options: Options) -> str | None:
    """The reason why a provider cannot do this problem, or None."""
    if provider.kind == "linear":
        if problem.window is not None:
            return "linear attention has no sliding window: its decays do what a window does"
        if problem.sink:
            return "linear attention has no softmax, to which a sink would add a score"
    return provider.unsupported(problem, options)


def layout_for(provider: Provider, options: Options) -> Layout:
    """The token layout to use: the one asked for, or the provider's default.

    Raises:
        ValueError: if the layout does not exist or the provider does not support it.
    """
    layout = get_layout(options.layout or provider.layouts[0])
    if layout.name not in provider.layouts:
        raise ValueError(
            f"provider {provider.name!r} does not run on the {layout.name} layout: "
            f"--cp-layout must be one of {', '.join(provider.layouts)}"
        )
    return layout


def _register(found: dict[str, Provider], provider: Provider, where: str) -> None:
    if provider.name in found:
        raise ValueError(f"two context-parallel providers are called {provider.name!r}; the second is in {where}")
    found[provider.name] = provider


def _flag(name: str) -> str:
    return f"--cp-{name.replace('_', '-')}"
