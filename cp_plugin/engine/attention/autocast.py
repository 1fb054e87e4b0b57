"""Autocast, by the rule of torch's own attention and convolutions: their arguments are cast to its dtype.

A model with float32 weights then has q and k in float32 (from RoPE) and v in bfloat16; all become bfloat16. What the
plugin computes in float32 inside, such as sums and states, stays so: autocast is off there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def cast[**P, R](*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a call: under autocast these of its arguments are cast, except float64, as torch does.

    names: of tensors; the first tells the device.
    """

    def decorated(call: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(call)
        place = list(signature.parameters).index(names[0])

        @wraps(call)
        def with_cast(*args: P.args, **named: P.kwargs) -> R:
            first: Any = named[names[0]] if names[0] in named else args[place]
            kind = first.device.type
            if not is_on(kind):
                return call(*args, **named)
            bound = signature.bind(*args, **named)
            for name in bound.arguments.keys() & set(names):
                bound.arguments[name] = _cast(bound.arguments[name], torch.get_autocast_dtype(kind))
            with off(kind):
                return call(*bound.args, **bound.kwargs)

        return with_cast

    return decorated


def off(kind: str) -> AbstractContextManager[Any]:
    """Inside the ``with`` block nothing is cast on such a device, also in a backward that is called under autocast."""
    return torch.autocast(kind, enabled=False) if is_on(kind) else nullcontext()


def is_on(kind: str) -> bool:
    """Return True if arguments on such a device are cast; the meta device has no autocast."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
