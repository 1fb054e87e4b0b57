"""Model FLOPs of a training step, by which published utilisation (MFU) becomes seconds."""

from __future__ import annotations

from cp_plugin.engine.linear.variants import variants
from cp_plugin.planner.training import operations
from cp_plugin.planner.training.model import LINEAR, WINDOW, Model

FORWARD_AND_BACKWARD = 3


def training(model: Model, seq_length: int, sequences: int = 1) -> float:
    """Model FLOPs: forward and backward without recomputation."""
    layers = model.all_layers
    per_token = sum(operations.projections(model, layer) + operations.ffn(model, layer) for layer in layers)
    per_token += (
        operations.head(model, model.vocab) * (1 + model.predicted) + operations.prediction(model) * model.predicted
    )
    attention = sum(core(model, layer, seq_length) for layer in layers)
    return FORWARD_AND_BACKWARD * sequences * (seq_length * per_token + attention)


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
