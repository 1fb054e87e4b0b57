"""Binding of library functions whose parameters change between versions.

A function that requires an unknown parameter, or lacks a needed one, is refused before the call, naming the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """A function with the parameters that are the same in every call, unless a call gives them."""

    function: Callable[..., Any]
    fixed: Mapping[str, Any]

    def __call__(self, **given: Any) -> Any:
        return self.function(**(self.fixed | given))


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a Python function or a torch custom operator."""
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def bind(
    function: Callable[..., Any], given: Collection[str], off: Mapping[str, Any], marks: Collection[str] = ()
) -> Bound:
    """Bind a function with every parameter accounted for; TypeError for a parameter that does not fit.

    Args:
        given: parameters passed in each call; all must exist.
        off: values that disable unused features; names that the function lacks are ignored.
        marks: other parameters that must exist, as versions without them are not supported.
    """
    wanted = parameters(function)
    name = getattr(function, "_init_fn", function).__name__
    for n in (*given, *marks):
        if n not in wanted:
            raise TypeError(f"{name} has no parameter {n!r}")
    for n, parameter in wanted.items():
        if n not in given and n not in off and parameter.default is inspect.Parameter.empty:
            raise TypeError(f"{name} needs {n!r}, which is unknown here")
    return Bound(function, {n: value for n, value in off.items() if n in wanted and n not in given})
