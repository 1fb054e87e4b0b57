"""``@eager``: exclude a function from torch.compile.

``torch.compiler.disable`` imports the compiler (a second) at decoration time; this defers it to the first call in a
process that has already imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

import torch


def eager[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Run the function, and everything it calls, outside torch.compile."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **named)
        sys.modules["torch._dynamo.eval_frame"].skip_code(call.__code__)  # else it compiles this frame
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **named)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a caller's graph breaks here, and not inside
    return call
