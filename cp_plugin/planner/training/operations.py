"""FLOPs of a model's forward; a multiply-add counts as two, and a backward has twice as many.

Megatron counts in the same way (``num_floating_point_operations``), without windows, as do published MFU figures.
"""

from __future__ import annotations

from cp_plugin.linear.variants import variants
from cp_plugin.planner.training import weights
from cp_plugin.planner.training.model import EXPERTS, LINEAR, WINDOW, Model

FORWARD_AND_BACKWARD = 3


def training(model: Model, seq_length: int, sequences: int = 1) -> float:
    """Model FLOPs: forward and backward without recomputation."""
    layers = model.all_layers
    per_token = sum(projections(model, layer) + ffn(model, layer) for layer in layers)
    per_token += head(model, model.vocab) * (1 + model.predicted) + prediction(model) * model.predicted
    attention = sum(core(model, layer, seq_length) for layer in layers)
    return FORWARD_AND_BACKWARD * sequences * (seq_length * per_token + attention)


def projections(model: Model, layer: int) -> int:
    """Per token: a layer's q, k, v and output projections."""
    return 2 * weights.projections(model, layer).total


def ffn(model: Model, layer: int) -> int:
    """Per token: a layer's FFN, or its experts and router."""
    matrices = 3 if model.gated else 2
    if model.ffn_of(layer) != EXPERTS:
        return 2 * matrices * model.hidden * model.ffn_hidden
    return routed(model) + shared(model) + 2 * model.hidden * model.experts


def routed(model: Model) -> int:
    """Per token: routed experts."""
    return 2 * (3 if model.gated else 2) * model.hidden * model.expert_hidden * model.top_k


def shared(model: Model) -> int:
    """Per token: the shared expert."""
    return 2 * (3 if model.gated else 2) * model.hidden * model.shared_hidden


def head(model: Model, vocab: int) -> int:
    return 2 * model.hidden * vocab


def prediction(model: Model) -> int:
    """Per token: the projection of a multi-token prediction layer."""
    return 4 * model.hidden**2


def core(model: Model, layer: int, seq_length: int) -> float:
    """Per sequence: causal attention itself, over the keys visible to each token."""
    letter = model.attention_of(layer)
    if letter == LINEAR:
        kind = variants()[model.linear]
        state = kind.features.size(model.head_dim) * (model.v_head_dim + kind.normalised)
        return 2 * (model.heads + model.kv_heads) * state * seq_length
    pairs = seq_length * seq_length / 2
    if letter == WINDOW and model.window is not None and 0 <= model.window[0] < seq_length:
        unseen = seq_length - model.window[0]
        pairs -= unseen * unseen / 2
    return 2 * pairs * model.heads * (model.head_dim + model.v_head_dim)
