"""Parameters of library functions that kernels are called by, from the libraries' sources: the JSON file beside this.

The record has, of each version, where it was read and, by function, its parameters in order with defaults, or the
schema of a torch operator.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RECORD: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Library -> version -> ``sources`` (a wheel or a commit, and the file) and ``functions``."""
FLA = {
    "simple_gla": "chunk_simple_gla",
    "gla": "chunk_gla",
    "delta_rule": "chunk_delta_rule",
    "gated_delta_rule": "chunk_gated_delta_rule",
    "kda": "chunk_kda",
}
"""Package of fla.ops -> function."""


def recorded(library: str, version: str, function: str) -> str:
    """Parameters as in the parentheses of a definition; for torch operators the schema.

    Raises:
        KeyError: if it has not been recorded.
    """
    return RECORD[library][version]["functions"][function]


def versions(library: str) -> tuple[str, ...]:
    """Those that have been recorded."""
    return tuple(RECORD[library])


def function(name: str, parameters: str, body: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A Python function with these parameters; ``body`` receives them by name."""
    scope: dict[str, Any] = {"body": body}
    exec(f"def {name}({parameters}):\n    return body(locals())", scope)
    return scope[name]


def put(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """Install a module with that content."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    patch.setitem(sys.modules, name, module)


def parameters_of(real: Callable[..., Any]) -> str:
    """Parameters of an installed function, in the recorded form."""
    shown = []
    for parameter in inspect.signature(getattr(real, "_init_fn", real)).parameters.values():
        default = "" if parameter.default is inspect.Parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return ", ".join(shown)
