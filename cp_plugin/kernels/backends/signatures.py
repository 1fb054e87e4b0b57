"""Calls of optional libraries whose functions change between versions: by name, and only if every name fits.

A function that wants something this plugin does not know of, or lacks something it needs, is refused before it is
called, with the name that does not fit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """A function, and the values of the parameters that are the same in every call."""

    function: Callable[..., Any]
    fixed: Mapping[str, Any]

    def __call__(self, **given: Any) -> Any:
        return self.function(**given, **self.fixed)


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a Python function or of a custom operator of torch."""
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def bind(
    function: Callable[..., Any], given: Collection[str], off: Mapping[str, Any], marks: Collection[str] = ()
) -> Bound:
    """The function with every parameter accounted for.

    Args:
        given: names that each call will give; the function must have all of them.
        off: values with which features that are not used are off; names that the function lacks are left out.
        marks: further names that it must have, because versions without them are not known here.

    Raises:
        TypeError: for a name that does not fit.
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
