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

from cp_plugin import methods
from cp_plugin.layout import Layout, get_layout
from cp_plugin.protocol import Options, Provider

ENTRY_POINTS = "cp_plugin.providers"


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


def names() -> list[str]:
    """The names of all providers."""
    return list(registry())


def get(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ValueError: if there is none; the message lists the valid names.
    """
    found = registry()
    if name not in found:
        raise ValueError(f"unknown provider {name!r}: --cp-provider must be one of {', '.join(found)}")
    return found[name]


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
