"""Layers that look at other tokens, and are not attention: divided, or refused by name.

Kind: anything in a model that mixes tokens outside the attention function. A comparison of all logits at random
initialisation does not see it in bfloat16 (5 % of the norm), nor where its weight is still zero. Public reports:
transformers 48491 and LlamaFactory 10787, sequence parallelism over hybrids whose linear layers saw their shard only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import each_value
from tiny import (
    CONVOLUTION,
    DELTA_NET,
    EXPERTS,
    Around,
    difference,
    differs,
    model_of,
    needs_transformers,
    refusal,
    summed,
    tokens,
    train,
)
from torch import Tensor, nn

from cp_plugin import ContextParallel, huggingface
from cp_plugin.testing.launch import run_ranks

pytestmark = needs_transformers

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "lfm2": CONVOLUTION,
    "lfm2_moe": {**CONVOLUTION, **EXPERTS, "num_experts": 4, "num_dense_layers": 1},
}
DTYPES = (torch.float32, torch.bfloat16)
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("ring", {"layout": "contiguous"}),
    ("ring", {"layout": "zigzag"}),
    ("attention2d", {"layout": "zigzag"}),
    ("ulysses", {}),
    ("needed", {"layout": "documents"}),
]


@each_value
@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}, {place[1].get('layout')}")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_delta_nets_and_convolutions_are_those_of_one_rank(kind: str, place: tuple[str, dict[str, Any]]) -> None:
    provider, options = place  # gradients of decays are as far from float64 in transformers' own chunks
    assert differs(model_of(kind, **HYBRIDS[kind]), provider, 2 if provider == "ulysses" else 4, **options) <= 1e-4


def test_delta_nets_in_bfloat16() -> None:
    """Loss and gradients as near to those of float32 as one rank's, where shards on their own were 10 to 110 % off."""
    whole = {"input_ids": tokens(), "labels": tokens()}
    exact, one = (train(model_of("qwen3_next", dtype, **HYBRIDS["qwen3_next"]), whole) for dtype in DTYPES)

    def rank() -> float:
        model = model_of("qwen3_next", torch.bfloat16, **HYBRIDS["qwen3_next"])
        cp = ContextParallel("ring", group=dist.group.WORLD)
        huggingface.apply(model, cp)
        return difference(summed(train(model, huggingface.shard(cp, tokens()))), exact)

    assert max(run_ranks(rank, 2, init_process_group=True)) <= 1.5 * difference(one, exact) + 0.01


def test_a_layout_that_parts_neighbours_is_refused() -> None:
    assert "need neighbouring tokens on the same rank, but the layout is striped: use zigzag" in refusal(
        model_of("lfm2", **CONVOLUTION), "striped"
    )


def convolved(x: Tensor) -> Tensor:
    """With weights of zero, as gates are initialised."""
    weight = torch.zeros(x.size(2), 1, 4, dtype=x.dtype)
    return nn.functional.conv1d(x.transpose(1, 2), weight, padding=3, groups=x.size(2))[..., : x.size(1)].transpose(
        1, 2
    )


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "token shift": lambda x: 1e-4 * x.roll(1, 1),
    "mean of all": lambda x: 1e-4 * x.mean(1, keepdim=True),
    "running sum": lambda x: 1e-4 * x.cumsum(1),
    "first token": lambda x: 1e-4 * x[:, :1],
    "last token": lambda x: 1e-4 * x[:, -1:],
    "norm over tokens": lambda x: 1e-3 * x / (1 + x.std(1, keepdim=True)),
    "statistics of the batch": lambda x: nn.functional.batch_norm(x.transpose(1, 2), None, None, training=True).mT,
    "convolution with weights of zero": convolved,
    "gate of zero": lambda x: 0 * x.mean(1, keepdim=True),
    "largest tokens only": lambda x: x * (x.norm(dim=2) >= x.norm(dim=2).topk(8, 1).values[:, -1:])[..., None],
}


@each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["mlp", "self_attn.q_proj", "self_attn.o_proj", "input_layernorm"])
@pytest.mark.parametrize("mix", MIXES)
def test_planted_mixing_is_found(mix: str, place: str, dtype: torch.dtype) -> None:
    """Planted behind, before and inside attention; the layer is named."""
    model = model_of("llama", dtype)
    parent, _, name = f"model.layers.1.{place}".rpartition(".")
    mixed = lambda self, x, *args, **named: self.layer(x + MIXES[mix](x).to(x.dtype), *args, **named)  # noqa: E731
    setattr(model.get_submodule(parent), name, Around(model.get_submodule(f"{parent}.{name}"), mixed))
    text = refusal(model)
    assert "mixes tokens by other means than attention" in text
    assert mix == "largest tokens only" or "in Around (model.layers.1" in text, text


def test_mixing_in_training_only_is_found() -> None:
    """As batch normalisation does."""
    model = model_of("llama")
    model.model.layers[0].mlp = Around(
        model.model.layers[0].mlp,
        lambda self, x: self.layer(x + 1e-3 * x.mean(1, keepdim=True) if self.training else x),
    )
    assert "in Around (model.layers.0.mlp) a token depends on others" in refusal(model)
    assert model.training


def crowded(around: Around, x: Tensor, capacity: int) -> Tensor:
    """Two experts by the sign of a number, each for the first tokens that ask for it."""
    chosen = x.new_zeros(*x.shape[:2], 2).scatter(2, (x[..., :1] > 0).long(), 1)
    kept = (chosen.flatten(0, 1).cumsum(0).view_as(chosen) * chosen).amax(-1, True) <= capacity
    return around.layer(x) * kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capacity", [160, 240])
def test_experts_with_capacity_are_found(capacity: int, dtype: torch.dtype) -> None:
    """Filled evenly, with half of the 256 tokens each, none is full."""
    model = model_of("llama", dtype)
    model.model.layers[1].mlp = Around(model.model.layers[1].mlp, partial(crowded, capacity=capacity))
    assert "changing one token changes the results of others" in refusal(model)


@pytest.mark.parametrize("kind", ["chunked_attention", "mamba", "heavily_compressed_attention"])
def test_unknown_kinds_of_layers_are_refused_by_name(kind: str) -> None:
    model = model_of("llama")
    model.config.layer_types = ["full_attention", kind]
    assert f"does not support a layer of {kind}" in refusal(model)
