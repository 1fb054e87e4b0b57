"""Generation from a model that the plugin trained: linear layers keep a state, softmax layers keys and values.

What a linear layer keeps does not grow with the text. Layers go on from what they kept, so each call of the model is
given the next tokens only: the prompt at once, then one token at a time. On one context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state, utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cp_plugin.megatron.attention import AnyCoreAttention
from cp_plugin.megatron.linear_attention import LinearCoreAttention


@dataclass(slots=True)
class Kept:
    """What one layer keeps."""

    tensors: tuple[Tensor, ...] = ()
    """Of a linear layer its state ``[b, g, d, e]``; of a softmax layer k and v ``[tokens, b, g, d]``."""

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


@dataclass(slots=True)
class Decoding:
    """The text so far, as the layers of a model keep it."""

    layers: dict[int, Kept] = field(default_factory=dict)
    """By layer number."""
    tokens: int = 0

    def linear(self, layer: LinearCoreAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next tokens through a linear layer."""
        kept = self.layers.setdefault(layer.layer_number, Kept())
        v, gate = v.chunk(2, 3) if layer.gate is not None else (v, None)
        out, state = layer.linear.extend(q, k, v, gate, kept.tensors[0] if kept.tensors else None)
        kept.tensors = (state,)
        return out

    def softmax(self, layer: AnyCoreAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The next tokens through a softmax layer, causal."""
        kept = self.layers.setdefault(layer.layer_number, Kept())
        k, v = (torch.cat((old, new)) for old, new in zip(kept.tensors or (k[:0], v[:0]), (k, v), strict=True))
        kept.tensors = (k, v)
        seen = torch.ones(q.size(0), k.size(0), dtype=torch.bool, device=q.device).tril(k.size(0) - q.size(0))
        heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=layer.softmax_scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3)


@contextmanager
def decoding(model: torch.nn.Module) -> Iterator[Decoding]:
    """While the block runs, the model takes the next tokens of a text instead of a whole one.

    Raises:
        ValueError: for a model with several context-parallel ranks or pipeline stages, or whose attention or positions
            are not the plugin's to continue.
    """
    if parallel_state.get_context_parallel_world_size() * parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise ValueError("generation runs on --context-parallel-size 1 and --pipeline-model-parallel-size 1")
    layers = [module for module in model.modules() if isinstance(module, AnyCoreAttention)]
    if not layers:
        raise ValueError("generation needs a model with the plugin's attention: --cp-linear-attention")
    if any(layer.config.sequence_parallel for layer in layers):
        raise ValueError("generation runs without --sequence-parallel: it would divide single tokens")
    so_far = Decoding()
    replaced: list[tuple[torch.nn.Module, str]] = []

    def replace(module: torch.nn.Module, name: str, function: Callable[..., Any]) -> None:
        module.__dict__[name] = function
        replaced.append((module, name))

    for layer in layers:
        step = so_far.linear if isinstance(layer, LinearCoreAttention) else so_far.softmax
        replace(layer, "attend", _step(step, layer))
    for module in model.modules():
        if type(module) is RotaryEmbedding:
            replace(module, "forward", _rotary(module.get_emb, so_far))
    try:
        yield so_far
    finally:
        for module, name in replaced:
            del module.__dict__[name]


def generate(model: torch.nn.Module, prompt: Tensor, new_tokens: int) -> Tensor:
    """The prompt ``[b, tokens]`` (int64), and the likeliest tokens after it, each chosen after the one before."""
    text = given = prompt
    with torch.inference_mode(), decoding(model) as so_far:
        for _ in range(new_tokens):
            given = extend(model, so_far, given)[:, -1:].argmax(-1)
            text = torch.cat((text, given), 1)
    return text


def extend(model: torch.nn.Module, so_far: Decoding, tokens: Tensor) -> Tensor:
    """Logits ``[b, tokens, vocabulary]`` of the next tokens ``[b, tokens]``."""
    first = so_far.tokens
    positions = torch.arange(first, first + tokens.size(1), device=tokens.device).expand_as(tokens)
    logits = model(tokens, positions, None)
    so_far.tokens += tokens.size(1)
    parallel = utils.get_attr_wrapped_model(model, "parallel_output")
    return gather_from_tensor_model_parallel_region(logits) if parallel else logits


def _step(function: Callable[..., Tensor], layer: AnyCoreAttention) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        return function(layer, query, key, value)

    return attend


def _rotary(get_emb: Callable[..., Tensor], so_far: Decoding) -> Callable[..., Tensor]:
    def forward(max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        return get_emb(max_seq_len, so_far.tokens)

    return forward
