"""Which models can be continued token by token, and what is switched off in them meanwhile."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention

from cp_plugin.megatron.layers.core_attention import AnyCoreAttention

CONTINUED = (AnyCoreAttention, DotProductAttention)
"""The plugin's attention and, where the model is not divided over context-parallel ranks, Megatron's own."""
_STATES = {
    "MambaMixer": "Mamba layers (M)",
    "GatedDeltaNet": "gated delta net layers (G)",
}


def check(model: torch.nn.Module) -> None:
    """ValueError for a model that generation cannot run; the message names what is in the way, and what to do."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        raise ValueError(
            f"generation runs on one pipeline stage, got --pipeline-model-parallel-size {stages}: use 1; a checkpoint "
            "in the torch_dist format loads on other numbers of stages"
        )
    layers = [module for module in model.modules() if isinstance(module, CONTINUED)]
    if not layers:
        raise ValueError("generation found no attention layer that it can continue: use --transformer-impl local")
    if any(layer.config.sequence_parallel for layer in layers):
        raise ValueError("generation runs without --sequence-parallel: it would divide single tokens")
    for module in model.modules():
        name = type(module).__name__
        if name in _STATES and type(module).__module__.startswith("megatron.core.ssm"):
            raise ValueError(f"generation cannot continue {_STATES[name]}: their state is not kept between tokens here")
        attention = getattr(module, "core_attention", None)
        if isinstance(attention, torch.nn.Module) and not isinstance(attention, CONTINUED):
            raise ValueError(
                f"generation cannot continue {type(attention).__name__}: use --transformer-impl local, or two or more "
                "context-parallel ranks with --cp-provider"
            )


def without_mtp(module: torch.nn.Module) -> dict[str, Any]:
    """Attributes of a model that keep multi-token prediction, which is for training, out of its forward."""
    config = getattr(module, "config", None)
    if not getattr(module, "mtp_process", False) or config is None:
        return {}
    from copy import copy

    plain = copy(config)
    plain.mtp_num_layers = None
    return {"mtp_process": False, "config": plain}
