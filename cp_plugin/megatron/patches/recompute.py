"""Activation recomputation that keeps attention's results and received data: see ``attention.recompute``.

Megatron passes layers to ``tensor_parallel.checkpoint``, or with FP8 to Transformer Engine's checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch

from cp_plugin.attention.recompute import Recomputed
from cp_plugin.megatron.patches.patching import Call, wraps
from cp_plugin.megatron.patches.run import Run


def _needed(run: Run) -> bool:
    return run.settings.active and not run.settings.recompute_attention and run.has("recompute_granularity")


@wraps(
    "megatron.core.tensor_parallel.random:checkpoint",
    "attention's results in recomputation",
    called_by="transformer blocks",
    otherwise="attention would be computed, and its keys sent, twice",
    when=_needed,
)
def replace_checkpoint(call: Call) -> Any:
    """Replaces ``checkpoint(function, ...)``; the first parameter is the function that is run twice."""
    if not torch.is_grad_enabled():  # evaluation: no second run
        return call.original()
    name, function = next(iter(call.arguments.items()))
    return call.original(**{name: Recomputed(function)})
