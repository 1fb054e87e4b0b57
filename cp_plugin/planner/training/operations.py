"""FLOPs of a model's forward; a multiply-add counts as two, and a backward pass has twice as many.

Megatron counts in the same way (``num_floating_point_operations``), without windows, as do published MFU figures.
"""

from __future__ import annotations

from cp_plugin.planner.training import weights
from cp_plugin.planner.training.model import EXPERTS, Model


def projections(model: Model, layer: int) -> int:
    """Per token: a layer's q, k, v and output projections."""
    return 2 * weights.projections(model, layer).total


def ffn(model: Model, layer: int) -> int:
    """Per token: a layer's FFN, or its experts and router."""
    if model.ffn_of(layer) != EXPERTS:
        return mlp(model, model.ffn_hidden)
    routed = mlp(model, model.expert_hidden * model.top_k)
    return routed + mlp(model, model.shared_hidden) + 2 * model.hidden * model.experts


def mlp(model: Model, width: int) -> int:
    """Per token: an FFN of that width, such as all experts that a token is routed to."""
    return 2 * (3 if model.gated else 2) * model.hidden * width


def head(model: Model, vocab: int) -> int:
    return 2 * model.hidden * vocab


def prediction(model: Model) -> int:
    """Per token: the projection of a multi-token prediction layer."""
    return 4 * model.hidden**2
