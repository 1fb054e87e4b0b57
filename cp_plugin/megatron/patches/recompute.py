"""Activation recomputation that keeps attention's results and received data: see ``attention.recompute``.

Megatron passes layers to ``tensor_parallel.checkpoint``, or with FP8 to Transformer Engine's checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_plugin.attention.recompute import Recomputed
from cp_plugin.megatron.patches.patching import Call, around


@around
def replace_checkpoint(call: Call) -> Any:
    """Replaces ``checkpoint(function, ...)``; the first parameter is the function that is run twice."""
    if not torch.is_grad_enabled():  # evaluation: no second run
        return call.original()
    name, function = next(iter(call.arguments.items()))
    return call.original(**{name: Recomputed(function)})
