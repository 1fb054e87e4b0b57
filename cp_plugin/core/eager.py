"""Functions that torch.compile calls, and does not look into.

    @eager
    def attention(...): ...

``torch.compiler.disable`` imports the compiler, which takes a second, where the function is defined. Here it is asked
for at the first call in a process that has imported the compiler anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

import torch


def eager[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function, left as it is by torch.compile, with all that it calls."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a caller's graph breaks here, and not inside
    return call
