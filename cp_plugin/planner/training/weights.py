"""Parameter counts by part, and by how Megatron shards them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cp_plugin.engine.linear.variants import Learned, variants
from cp_plugin.planner.training.model import EXPERTS, LINEAR, Model


class Weights(NamedTuple):
    """Parameter counts by sharding."""

    sharded: int = 0
    """Over tensor-parallel ranks."""
    replicated: int = 0
    """Norms, routers, MLA's down projections."""
    routed: int = 0
    """Experts: over expert-parallel ranks, and the experts' tensor-parallel ranks."""

    @property
    def total(self) -> int:
        return sum(self)


def embedding(model: Model, vocab: int) -> Weights:
    """Token embedding, sharded, and learned positions, replicated."""
    return Weights(sharded=vocab * model.hidden, replicated=model.positions * model.hidden)


def head(model: Model, vocab: int) -> Weights:
    """The output layer, unless tied, and the final norm."""
    return Weights(sharded=0 if model.tied else vocab * model.hidden, replicated=_norm(model, model.hidden))


def attention(model: Model, layer: int) -> Weights:
    """One layer's attention, with its norms."""
    norms = _norm(model, model.hidden) + 2 * _norm(model, model.head_dim) * model.qk_norm
    if model.latent:
        norms += _norm(model, model.kv_rank) + _norm(model, model.q_rank)
        return summed([projections(model, layer), Weights(replicated=norms)])
    made = model.heads * model.head_dim + model.kv_heads * (model.head_dim + model.v_head_dim)
    biases = Weights(sharded=made * (model.bias or model.qkv_bias), replicated=model.hidden * model.bias)
    beside = _linear(model).vectors if model.attention_of(layer) == LINEAR else 0
    return summed([projections(model, layer), Weights(beside, norms), biases])


def projections(model: Model, layer: int) -> Weights:
    """One layer's q, k, v and output projections."""
    h, d, e = model.hidden, model.head_dim, model.v_head_dim
    out = model.heads * e * h
    if model.latent:
        q = model.heads * d * (model.q_rank or h)
        kv = model.kv_rank * model.heads * (d - model.rope_dim + e)
        return Weights(sharded=q + kv + out, replicated=h * (model.q_rank + model.kv_rank + model.rope_dim))
    made = h * (model.heads * d + model.kv_heads * (d + e))
    if model.attention_of(layer) != LINEAR:
        return Weights(sharded=made + out)
    own = _linear(model)
    return Weights(sharded=made + out + own.matrices, replicated=own.replicated)


def ffn(model: Model, layer: int) -> Weights:
    """One layer's FFN with its norm, router and all experts."""
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
    """A multi-token prediction layer beyond an ordinary layer: two norms, a projection, and a final norm."""
    return Weights(sharded=2 * model.hidden**2, replicated=3 * _norm(model, model.hidden))


def summed(parts: Iterable[Weights]) -> Weights:
    return Weights(*(sum(column) for column in zip(Weights(), *parts, strict=True)))


def _linear(model: Model) -> Learned:
    kind = variants()[model.linear]
    return kind.learned(model.heads, model.kv_heads, model.head_dim, model.v_head_dim, model.hidden)


def _norm(model: Model, size: int) -> int:
    return size if model.norm == "rms" else 2 * size
