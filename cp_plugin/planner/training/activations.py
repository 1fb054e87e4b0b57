"""What a layer keeps of a micro-batch for its backward, in bytes on one device.

The inventory of Korthikanti et al. (arXiv 2205.05198, section 4), written out by tensor instead of as
``s b h (34 + 5 a s / h)``, with what has changed since: attention keeps its output and one number per row instead of
scores (flash attention), there is no dropout, keys and values have heads of their own (GQA, MLA), an FFN may be gated
or consist of experts, and tokens are shared by context-parallel ranks. Products of matrices keep their inputs in the
dtype of the model (FP8 products, which can keep them in one byte, are counted with two).
"""

from __future__ import annotations

from typing import NamedTuple

from cp_plugin.linear.features import IDENTITY
from cp_plugin.linear.variants import feature_dim, variants
from cp_plugin.planner.training.model import EXPERTS, LINEAR, Model
from cp_plugin.planner.training.parallel import Parallel

LSE = 4
"""Bytes of the logarithm of a row's sum of exponentials, and of other numbers in float32."""


class Kept(NamedTuple):
    """A tensor, or several of one kind, kept from a forward for the backward."""

    name: str
    nbytes: float
    module: str = ""
    """What selective recomputation calls the part of the layer that makes it; empty: it is always kept."""


def layer(model: Model, parallel: Parallel, number: int) -> list[Kept]:
    """Everything that a layer keeps without recomputation."""
    return [*_attention(model, parallel, number), *_ffn(model, parallel, number)]


def kept(model: Model, parallel: Parallel, number: int) -> float:
    """Bytes that a layer keeps, without what recomputation drops; where it is full, this is a layer that it drops."""
    if parallel.recompute == "full":
        total = layer_input(model, parallel) / parallel.recompute_group
        return total if parallel.recompute_attention else total + attention_results(model, parallel, number)
    dropped = set(parallel.recompute_modules) if parallel.recompute == "selective" else set()
    if not parallel.recompute_attention:
        dropped -= {"core_attn"}
    return sum(tensor.nbytes for tensor in layer(model, parallel, number) if tensor.module not in dropped)


def whole(model: Model, parallel: Parallel, number: int) -> float:
    """Bytes that a layer keeps without recomputation."""
    return sum(tensor.nbytes for tensor in layer(model, parallel, number))


def layer_input(model: Model, parallel: Parallel) -> float:
    """Bytes of the hidden states that go into a layer."""
    return parallel.tokens * model.hidden * parallel.element / parallel.sequence_split


def attention_results(model: Model, parallel: Parallel, number: int) -> float:
    """Bytes of the output of attention, and of what belongs to it."""
    names = ("attention output", "attention lse")
    return sum(tensor.nbytes for tensor in _attention(model, parallel, number) if tensor.name in names)


def ffn_gradients(model: Model, parallel: Parallel, number: int) -> float:
    """Bytes of the gradients that are alive at once in the backward of an FFN: of its middle and of its output."""
    middle = _width(model, parallel, number) * (3 if model.gated else 2)
    return parallel.element * middle + layer_input(model, parallel)


def _attention(model: Model, parallel: Parallel, number: int) -> list[Kept]:
    rows, b, tp = parallel.tokens, parallel.element, parallel.tensor
    hidden = layer_input(model, parallel)
    found = [Kept("attention norm input", hidden), Kept("attention norm output", hidden, "layernorm")]
    heads, kv_heads = model.heads / tp, max(1.0, model.kv_heads / tp)
    if model.latent:
        # each compressed vector before and after its norm; the rotated part of the key
        compressed = 2 * model.q_rank + 2 * model.kv_rank + model.rope_dim
        found.append(Kept("compressed q, k and v", rows * compressed * b / parallel.sequence_split))
        kv_heads = heads
    sizes = heads * model.head_dim + kv_heads * (model.head_dim + model.v_head_dim)
    found.append(Kept("q, k and v", rows * sizes * b, "mla_up_proj" if model.latent else ""))
    found.append(Kept("allocated with v", rows * _beside_v(model, number, heads, kv_heads) * b))
    if model.attention_of(number) == LINEAR:
        kind = variants()[model.linear]
        if kind.features is not IDENTITY:
            features = feature_dim(kind, model.head_dim)
            found.append(Kept("features of q and k", rows * (heads + kv_heads) * features * b))
        if kind.gated:
            found.append(Kept("log decays", rows * kv_heads * model.head_dim * LSE))
    else:
        found.append(Kept("attention lse", rows * heads * LSE, "core_attn"))
    return [*found, Kept("attention output", rows * heads * model.v_head_dim * b)]


def _beside_v(model: Model, number: int, heads: float, kv_heads: float) -> float:
    """Elements of a token that stay allocated because v is a part of the same storage: q and k before their rotation.

    MLA, and linear attention that appends a one to v, make a storage of its own for v.
    """
    copied = model.attention_of(number) == LINEAR and variants()[model.linear].normalised
    return 0 if model.positions or model.latent or copied else (heads + kv_heads) * model.head_dim


def _ffn(model: Model, parallel: Parallel, number: int) -> list[Kept]:
    b, up = parallel.element, 2 if model.gated else 1
    hidden = layer_input(model, parallel)
    found = [Kept("FFN norm input", hidden), Kept("FFN norm output", hidden, "layernorm")]
    if model.ffn_of(number) != EXPERTS:
        width = _width(model, parallel, number)
        return [*found, Kept("FFN first product", up * width * b, "mlp"), Kept("FFN activation", width * b, "mlp")]
    rows = parallel.tokens / parallel.sequence_split
    sent = parallel.expert_tokens * model.top_k  # tokens are spread evenly over the experts
    middle = sent * model.expert_hidden / parallel.expert_tensor
    found += [
        Kept("router", 2 * rows * model.experts * LSE, "moe"),  # scores and probabilities
        Kept("tokens of experts", sent * model.hidden * b, "moe"),
        Kept("experts' first product", up * middle * b, "moe"),
        Kept("experts' activation", middle * b, "moe_act"),
    ]
    if model.shared_hidden:
        width = parallel.tokens * model.shared_hidden / parallel.tensor
        found.append(Kept("shared expert", (up + 1) * width * b, "shared_experts"))
    if parallel.recompute == "selective" and "moe" in parallel.recompute_modules:
        return [tensor._replace(module="moe") if tensor.module not in ("", "layernorm") else tensor for tensor in found]
    return found


def _width(model: Model, parallel: Parallel, number: int) -> float:
    """Elements of the middle of an FFN: of each of its one or two first products."""
    if model.ffn_of(number) != EXPERTS:
        return parallel.tokens * model.ffn_hidden / parallel.tensor
    return parallel.expert_tokens * model.top_k * model.expert_hidden / parallel.expert_tensor
