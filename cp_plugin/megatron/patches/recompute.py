"""Megatron's activation recomputation keeps what attention computed and received: see ``attention.recompute``.

Full recomputation, and selective recomputation of ``core_attn``, hand the layers to ``tensor_parallel.checkpoint``, or
to Transformer Engine's checkpoint with FP8. Both get a function that remembers instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from cp_plugin.attention.recompute import Recomputed


def replace_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement for ``checkpoint(function, ...)``, whose first parameter is what it runs twice."""
    signature = inspect.signature(original)
    first = next(iter(signature.parameters))

    @functools.wraps(original)
    def checkpoint(*positional: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():  # an evaluation: there is no second run
            return original(*positional, **named)
        call = signature.bind(*positional, **named)
        call.arguments[first] = Recomputed(call.arguments[first])
        return original(*call.args, **call.kwargs)

    return checkpoint
