"""Megatron's activation recomputation keeps what attention computed and received: see ``attention.recompute``.

Full recomputation, and selective recomputation of ``core_attn``, hand the layers to ``tensor_parallel.checkpoint``, or
to Transformer Engine's checkpoint with FP8. Both get a function that remembers instead.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_plugin.attention.recompute import Recomputed
from cp_plugin.megatron.patches.patching import Call, around


@around
def replace_checkpoint(call: Call) -> Any:
    """The replacement for ``checkpoint(function, ...)``, whose first parameter is what it runs twice."""
    if not torch.is_grad_enabled():  # an evaluation: there is no second run
        return call.original()
    name, function = next(iter(call.arguments.items()))
    return call.original(**{name: Recomputed(function)})
