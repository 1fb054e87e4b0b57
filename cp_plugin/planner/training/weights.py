"""Parameters of a model, by part, and by how Megatron divides them over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cp_plugin.linear.features import PROJECTED
from cp_plugin.linear.variants import variants
from cp_plugin.planner.training.model import EXPERTS, LINEAR, Model

GATE_RANK = 16
"""Of the low-rank gate of gated linear attention: ``cp_plugin.megatron.layers.gate``."""


class Weights(NamedTuple):
    """Numbers of parameters."""

    sharded: int = 0
    """Divided over the tensor-parallel ranks."""
    replicated: int = 0
    """The same on all of them: norms, routers, the projections of MLA to the compressed query, key and value."""
    routed: int = 0
    """Of experts: divided over the expert-parallel ranks, and over the tensor-parallel ranks of experts."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Parameters(NamedTuple):
    """Numbers of parameters of a model."""

    embedding: int
    attention: int
    """With the norms before it."""
    ffn: int
    """With the norms before it, routers and all experts."""
    head: int
    """The output layer, unless it is the embedding, and the norm before it."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def parameters(model: Model) -> Parameters:
    """Of the whole model, without padding of the vocabulary."""
    layers = model.all_layers
    return Parameters(
        embedding=embedding(model, model.vocab).total,
        attention=summed(attention(model, layer) for layer in layers).total,
        ffn=summed(ffn(model, layer) for layer in layers).total + prediction(model).total * model.predicted,
        head=head(model, model.vocab).total,
    )


def active(model: Model) -> int:
    """Parameters that a token meets: of the experts, those that it goes to."""
    routed = sum(ffn(model, layer).routed for layer in model.all_layers)
    return parameters(model).total - routed + routed * model.top_k // model.experts


def embedding(model: Model, vocab: int) -> Weights:
    """Of tokens, divided over tensor-parallel ranks, and of learned positions, which are not."""
    return Weights(sharded=vocab * model.hidden, replicated=model.positions * model.hidden)


def head(model: Model, vocab: int) -> Weights:
    """The output layer, unless it is the embedding, and the norm before it."""
    return Weights(sharded=0 if model.tied else vocab * model.hidden, replicated=_norm(model, model.hidden))


def attention(model: Model, layer: int) -> Weights:
    """Of one layer, with the norm before it."""
    norms = _norm(model, model.hidden) + 2 * _norm(model, model.head_dim) * model.qk_norm
    if model.latent:
        norms += _norm(model, model.kv_rank) + _norm(model, model.q_rank)
        return summed([projections(model, layer), Weights(replicated=norms)])
    made = model.heads * model.head_dim + model.kv_heads * (model.head_dim + model.v_head_dim)
    biases = Weights(sharded=made * (model.bias or model.qkv_bias), replicated=model.hidden * model.bias)
    beside = _beside_linear(model) if model.attention_of(layer) == LINEAR else Weights()
    return summed([projections(model, layer), Weights(replicated=norms), biases, beside])


def projections(model: Model, layer: int) -> Weights:
    """Of the matrices of one layer's attention: those that make queries, keys, values and the output."""
    h, d, e = model.hidden, model.head_dim, model.v_head_dim
    out = model.heads * e * h
    if model.latent:
        q = model.heads * d * (model.q_rank or h)
        kv = model.kv_rank * model.heads * (d - model.rope_dim + e)
        return Weights(sharded=q + kv + out, replicated=h * (model.q_rank + model.kv_rank + model.rope_dim))
    made = h * (model.heads * d + model.kv_heads * (d + e))
    if model.attention_of(layer) != LINEAR:
        return Weights(sharded=made + out)
    kind = variants()[model.linear]
    mapped = (model.heads + model.kv_heads) * d * PROJECTED if kind.features.projected else 0
    gate = GATE_RANK * kind.gated  # down to that, the same on all ranks, and up again
    return Weights(sharded=made + out + mapped + gate * model.kv_heads * d, replicated=gate * h)


def ffn(model: Model, layer: int) -> Weights:
    """Of one layer, with the norm before it, and all experts."""
    h, matrices = model.hidden, 3 if model.gated else 2
    replicated = _norm(model, h)
    if model.ffn_of(layer) != EXPERTS:
        f = model.ffn_hidden
        return Weights(
            sharded=matrices * h * f + (matrices - 1) * f * model.bias, replicated=replicated + h * model.bias
        )
    return Weights(
        sharded=matrices * h * model.shared_hidden,
        replicated=replicated + h * model.experts,
        routed=model.experts * matrices * h * model.expert_hidden,
    )


def prediction(model: Model) -> Weights:
    """Of one layer of multi-token prediction, beside a layer's own: two norms, a projection, and a norm after it."""
    return Weights(sharded=2 * model.hidden**2, replicated=3 * _norm(model, model.hidden))


def summed(parts: Iterable[Weights]) -> Weights:
    """All together."""
    return Weights(*(sum(column) for column in zip(Weights(), *parts, strict=True)))


def _beside_linear(model: Model) -> Weights:
    """What linear attention has beside its matrices: norms of features and of outputs, the bias of a gate."""
    kind = variants()[model.linear]
    learned = 2 * PROJECTED * (model.heads + model.kv_heads) if kind.features.learned_norm else 0
    gains = model.heads * model.v_head_dim if kind.norm != "none" else 0
    bias = model.kv_heads * model.head_dim if kind.gated else 0
    return Weights(sharded=learned + gains + bias)


def _norm(model: Model, size: int) -> int:
    return size if model.norm == "rms" else 2 * size
