"""Activations that a layer keeps for its backward, in bytes per micro-batch and device.

The inventory of Korthikanti et al. (arXiv 2205.05198, section 4) by tensor, updated: attention keeps its output and one
number per row instead of scores (flash attention), there is no dropout, keys and values have their own heads (GQA,
MLA), FFNs may be gated or have experts, and context-parallel ranks shard the tokens. Matrix products keep their inputs
in the model's dtype (also in FP8, which could keep one byte).
"""

from __future__ import annotations

from typing import NamedTuple

from cp_plugin.engine.linear.features import IDENTITY
from cp_plugin.engine.linear.variants import variants
from cp_plugin.planner.training.model import EXPERTS, LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel

LSE = 4
"""Bytes of a row's log-sum-exp, and of other float32 numbers."""


class Kept(NamedTuple):
    """A kept tensor, or several of one kind."""

    name: str
    nbytes: float
    module: str = ""
    """Its name in ``--recompute-modules``; empty: always kept."""


def layer(model: Model, parallel: Parallel, number: int) -> list[Kept]:
    """All tensors that a layer keeps without recomputation."""
    return [*_attention(model, parallel, number), *_ffn(model, parallel, number)]


def kept(model: Model, parallel: Parallel, number: int) -> float:
    """Bytes that a layer keeps under recomputation; if it is recomputed whole: its input and, unless they are
    recomputed, too, attention's results."""
    if parallel.recompute == "full":
        results = () if parallel.recompute_attention else ("attention output", "attention lse")
        results_bytes = (tensor.nbytes for tensor in _attention(model, parallel, number) if tensor.name in results)
        return layer_input(model, parallel) / parallel.recompute_group + sum(results_bytes)
    dropped = set(parallel.recompute_modules) if parallel.recompute == "selective" else set()
    if not parallel.recompute_attention:
        dropped -= {"core_attn"}
    return sum(tensor.nbytes for tensor in layer(model, parallel, number) if tensor.module not in dropped)


def whole(model: Model, parallel: Parallel, number: int) -> float:
    """Bytes that a layer keeps without recomputation."""
    return sum(tensor.nbytes for tensor in layer(model, parallel, number))


def layer_input(model: Model, parallel: Parallel) -> float:
    """Bytes of a layer's input hidden states."""
    return parallel.tokens * model.hidden * parallel.element / parallel.sequence_split


def ffn_gradients(model: Model, parallel: Parallel, number: int) -> float:
    """Peak bytes of gradients in the backward pass of an FFN: intermediate and output."""
    middle = _width(model, parallel, number) * (3 if model.gated else 2)
    return parallel.element * middle + layer_input(model, parallel)


def _attention(model: Model, parallel: Parallel, number: int) -> list[Kept]:
    rows, b, tp = parallel.tokens, parallel.element, parallel.tensor
    hidden = layer_input(model, parallel)
    parts = [Kept("attention norm input", hidden), Kept("attention norm output", hidden, "layernorm")]
    heads, kv_heads = model.heads / tp, max(1.0, model.kv_heads / tp)
    if model.latent:
        # each latent vector before and after its norm; the rotated key part
        compressed = 2 * model.q_rank + 2 * model.kv_rank + model.rope_dim
        parts.append(Kept("compressed q, k and v", rows * compressed * b / parallel.sequence_split))
        kv_heads = heads
    sizes = heads * model.head_dim + kv_heads * (model.head_dim + model.v_head_dim)
    parts.append(Kept("q, k and v", rows * sizes * b, "mla_up_proj" if model.latent else ""))
    parts.append(Kept("allocated with v", rows * _kept_with_v(model, number, heads, kv_heads) * b))
    if model.attention_of(number) == LINEAR:
        kind = variants()[model.linear]
        if kind.features is not IDENTITY:
            features = kind.features.size(model.head_dim)
            parts.append(Kept("features of q and k", rows * (heads + kv_heads) * features * b))
        if kind.gated:
            parts.append(Kept("log decays", rows * kv_heads * model.head_dim * LSE))
    else:
        parts.append(Kept("attention lse", rows * heads * LSE, "core_attn"))
    return [*parts, Kept("attention output", rows * heads * model.v_head_dim * b)]


def _kept_with_v(model: Model, number: int, heads: float, kv_heads: float) -> float:
    """Elements per token of unrotated q and k, which stay allocated because v shares their storage.

    MLA, and linear attention that appends a one to v, allocate v separately.
    """
    copied = model.attention_of(number) == LINEAR and variants()[model.linear].normalised
    return 0 if model.positions or model.latent or copied else (heads + kv_heads) * model.head_dim


def _ffn(model: Model, parallel: Parallel, number: int) -> list[Kept]:
    b, up = parallel.element, 2 if model.gated else 1
    hidden = layer_input(model, parallel)
    parts = [Kept("FFN norm input", hidden), Kept("FFN norm output", hidden, "layernorm")]
    if model.ffn_of(number) != EXPERTS:
        width = _width(model, parallel, number)
        return [*parts, Kept("FFN first product", up * width * b, "mlp"), Kept("FFN activation", width * b, "mlp")]
    rows = parallel.tokens / parallel.sequence_split
    sent = parallel.expert_tokens * model.top_k  # tokens are spread evenly over the experts
    middle = sent * model.expert_hidden / parallel.expert_tensor
    parts += [
        Kept("router", 2 * rows * model.experts * LSE, "moe"),  # scores and probabilities
        Kept("tokens of experts", sent * model.hidden * b, "moe"),
        Kept("experts' first product", up * middle * b, "moe"),
        Kept("experts' activation", middle * b, "moe_act"),
    ]
    if model.shared_hidden:
        width = parallel.tokens * model.shared_hidden / parallel.tensor
        parts.append(Kept("shared expert", (up + 1) * width * b, "shared_experts"))
    if parallel.recompute == "selective" and "moe" in parallel.recompute_modules:
        return [tensor._replace(module="moe") if tensor.module not in ("", "layernorm") else tensor for tensor in parts]
    return parts


def _width(model: Model, parallel: Parallel, number: int) -> float:
    """Elements of an FFN's intermediate, per first product."""
    if model.ffn_of(number) != EXPERTS:
        return parallel.tokens * model.ffn_hidden / parallel.tensor
    return parallel.expert_tokens * model.top_k * model.expert_hidden / parallel.expert_tensor
