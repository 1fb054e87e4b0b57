"""Binding of library functions whose parameters change between versions.

A function that requires an unknown parameter, or lacks a needed one, is refused before the call, naming the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Parameters of a Python function or a torch custom operator."""
    return inspect.signature(getattr(function, "_init_fn", function)).parameters


def bind(
    function: Callable[..., Any], passed: Collection[str], off: Mapping[str, Any], marks: Collection[str] = ()
) -> partial[Any]:
    """Bind a function with every parameter accounted for; TypeError for a parameter that does not fit.

    Args:
        passed: parameters passed in each call; all must exist.
        off: values that disable unused features; names that the function lacks are ignored.
        marks: other parameters that must exist, as versions without them are not supported.
    """
    fixed = {n: value for n, value in off.items() if n in parameters(function) and n not in passed}
    real = getattr(function, "_init_fn", function)
    try:
        inspect.signature(real).bind(**fixed | dict.fromkeys((*passed, *marks)))
    except TypeError as wrong:
        raise TypeError(f"{real.__name__}: {wrong}") from None
    return partial(function, **fixed)
