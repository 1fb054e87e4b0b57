"""What providers, kernels and kinds of linear attention declare about themselves, without importing them.

Importing them imports torch, which takes longer than checking a command line. ``declared.json`` therefore has the
declarations of the built-in ones; ``python -m cp_plugin.megatron.flags.declared`` writes it. Where third parties have
installed more, all are imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cp_plugin.engine.common.names import one_of
from cp_plugin.engine.common.plugins import third_parties
from cp_plugin.engine.core import options as functions
from cp_plugin.engine.core.options import AUTO, Option

FILE = Path(__file__).with_suffix(".json")
LAYOUT, KERNEL = "layout", "backend"
_TEXTS = ("metavar", "meaning", "default", "unset", "write", "choices")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A provider's declaration."""

    kind: str  # softmax, linear
    layouts: tuple[str, ...]
    options: tuple[str, ...]  # all that it takes, besides layout and kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """All declarations, in the order in which messages list them."""

    methods: Mapping[str, Method]
    options: Mapping[str, Option]
    layouts: tuple[str, ...]
    kernels: tuple[str, ...]  # of softmax attention
    linear_kernels: tuple[str, ...]
    variants: Mapping[str, str]  # kind of linear attention -> summary

    def names(self, kind: str = "softmax") -> list[str]:
        """The providers of a kind of attention."""
        return [name for name, method in self.methods.items() if method.kind == kind]

    def takers(self, option: str, kind: str = "softmax") -> list[str]:
        """The providers of a kind that take an option; all of them take layout and kernel."""
        return [name for name in self.names(kind) if self.takes(name, option)]

    def takes(self, provider: str, option: str) -> bool:
        """Whether a provider takes an option."""
        return option in (LAYOUT, KERNEL, *self.methods[provider].options)

    def check_kernel(self, name: str) -> None:
        """ValueError for an unknown kernel of softmax attention."""
        one_of(self.options[KERNEL].flag, name, (self.options[KERNEL].unset, *self.kernels))

    def check_layout(self, name: str) -> None:
        """ValueError for an unknown layout."""
        one_of(self.options[LAYOUT].flag, name, self.layouts)


@cache
def declared() -> Declared:
    """The declarations of everything that is installed."""
    return imported() if third_parties() else from_json(json.loads(FILE.read_text()))


def imported() -> Declared:
    """The declarations of everything that is installed, from the objects themselves; imports torch."""
    from cp_plugin.engine.kernels import backends
    from cp_plugin.engine.linear.kernels import KERNELS
    from cp_plugin.engine.linear.variants import variants
    from cp_plugin.engine.methods import registry
    from cp_plugin.engine.placement.documents import ALL

    options = registry.registry().options
    others = [str(name) for name in options if name not in (LAYOUT, KERNEL)]
    methods = {
        name: Method(
            kind=provider.kind,
            layouts=provider.layouts,
            options=tuple(option for option in others if registry.takes(provider, option)),
        )
        for name, provider in registry.registry().items()
    }
    return Declared(
        methods=methods,
        options=options,
        layouts=tuple(ALL),
        kernels=tuple(name for name in backends.names() if name != AUTO),
        linear_kernels=tuple(KERNELS),
        variants={name: variant.summary for name, variant in variants().items()},
    )


def as_json(found: Declared) -> str:
    """The text of ``declared.json``."""
    options = {str(name): _option(option) for name, option in found.options.items()}
    methods = {name: asdict(method) for name, method in found.methods.items()}
    return (
        json.dumps({**asdict(replace(found, options={}, methods={})), "options": options, "methods": methods}, indent=1)
        + "\n"
    )


def from_json(found: Mapping[str, Any]) -> Declared:
    """Read what ``as_json`` writes."""
    options = {}
    for name, parts in found["options"].items():
        named = {"read": getattr(functions, parts["read"])} if "read" in parts else {}
        texts = {part: parts[part] for part in _TEXTS} | {"choices": tuple(parts["choices"])}
        options[name] = Option(name, **texts, **named)
    methods = {
        name: Method(kind=m["kind"], layouts=tuple(m["layouts"]), options=tuple(m["options"]))
        for name, m in found["methods"].items()
    }
    others = {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}
    return Declared(**{**others, "options": options, "methods": methods})


def _option(option: Option) -> dict[str, Any]:
    """The texts of an option, and the name of its parser if it is one of ``core.options``, or else the default."""
    name = getattr(option.read, "__name__", "")
    own = {"read": name} if getattr(functions, name, None) is option.read else {}
    return {**{part: getattr(option, part) for part in _TEXTS}, **own}


if __name__ == "__main__":
    FILE.write_text(as_json(imported()))
    print(f"wrote {FILE}")
