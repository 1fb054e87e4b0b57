"""Context-parallel attention for Megatron-LM, NeMo and plain torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cp_plugin.engine.attention.api import ContextParallel
    from cp_plugin.engine.core.options import Options
    from cp_plugin.engine.core.problem import Problem
    from cp_plugin.engine.core.tree import Tree
    from cp_plugin.engine.core.values import Gradients, KeyValues, Partial, Queries
    from cp_plugin.engine.methods.protocol import Attend, Provider

__version__ = "0.1.0"
__all__ = [
    "Attend",
    "ContextParallel",
    "Gradients",
    "KeyValues",
    "Options",
    "Partial",
    "Problem",
    "Provider",
    "Queries",
    "Tree",
]
_MODULES = {
    "engine.attention.api": ("ContextParallel",),
    "engine.core.options": ("Options",),
    "engine.core.problem": ("Problem",),
    "engine.core.tree": ("Tree",),
    "engine.core.values": ("Gradients", "KeyValues", "Partial", "Queries"),
    "engine.methods.protocol": ("Attend", "Provider"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch alone takes longer than reading a command line."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
