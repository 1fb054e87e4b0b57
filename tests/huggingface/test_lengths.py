"""Angles and scales are those of the whole sequence.

Kind: whatever is computed from the length of a shard, or from indices in it. Dynamic NTK took each rank's own largest
position: q_proj was 0.5 to 34 % off, and the rank with the last token was right. LongRoPE changes its factors beyond
the original length in the same way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from nightly import each_value
from tiny import Around, differs, model_of, needs_transformers, refusal, tokens, train
from torch import Tensor

from cp_plugin import ContextParallel, huggingface

pytestmark = needs_transformers

FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": {**FACTORS, "factor": 4.0, "original_max_position_embeddings": 100},
}


@each_value
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", ["llama", "olmo2", "qwen3"])
@pytest.mark.parametrize("rope", ROPES)
def test_every_rope_is_that_of_one_rank(rope: str, kind: str, layout: str) -> None:
    parameters = {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}
    model = model_of(kind, rope_parameters=parameters, max_position_embeddings=32 if rope == "dynamic" else 128)
    whole = {"input_ids": tokens(128), "labels": tokens(128)}
    assert differs(model, "ring", 4, whole=whole, layout=layout) <= 2e-5


def test_lengths_that_change_leave_the_same_state() -> None:
    """Dynamic NTK keeps the angles of the longest sequence, until a short one comes."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model, other = (model_of("llama", rope_parameters=parameters, max_position_embeddings=32) for _ in range(2))
    huggingface.apply(other, cp := ContextParallel("ring"))
    for length in (128, 64, 16, 48):
        one = train(model, {"input_ids": tokens(length), "labels": tokens(length)})
        assert train(other, huggingface.shard(cp, tokens(length))).loss == one.loss


SCALES = {
    "10 % over the shard": lambda x: 1 + 0.1 * torch.arange(x.size(1))[None, :, None] / x.size(1),
    "logarithm of the length": lambda x: torch.tensor(x.size(1)).log(),
    "index in the shard": lambda x: 1 + 0.1 * torch.arange(x.size(1))[None, :, None],
    "length of the longest sequence": lambda x: 1.0 if x.size(1) < 40 else 2.0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_planted_local_scales_are_found(name: str, dtype: torch.dtype) -> None:
    model = model_of("llama", dtype)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Around(attention.q_proj, lambda self, x: (self.layer(x) * SCALES[name](x)).to(x.dtype))
    text = refusal(model, "striped", 4)
    assert "would compute something else on shards: in attention 1 the queries" in text, text


def noisy(around: Around, x: Tensor, draw: Any) -> Tensor:
    """With noise whose size is computed from the shard."""
    out: Tensor = around.layer(x)
    return out + draw(out, x.size(1) ** -0.5).to(out) if around.training else out


DRAWS = {
    "uniform_": lambda x, size: torch.zeros_like(x).uniform_(-size, size),
    "normal_": lambda x, size: torch.empty_like(x).normal_(std=size),
    "randn_like": lambda x, size: torch.randn_like(x) * size,
    "rand": lambda x, size: (torch.rand(x.shape) - 0.5) * size,
}


@pytest.mark.parametrize("name", DRAWS)
def test_noise_of_a_local_size_is_found(name: str) -> None:
    model = model_of("llama")
    model.model.embed_tokens = Around(model.model.embed_tokens, partial(noisy, draw=DRAWS[name]))
    text = refusal(model)
    assert "would compute something else on shards" in text and text.endswith("in training"), text


def test_positions_that_are_not_taken_are_found() -> None:
    """Planted: angles of the index, whatever the position_ids."""
    model = model_of("llama")
    rotary = model.model.rotary_emb
    forward = type(rotary).forward

    def by_index(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        return forward(self, x, torch.arange(position_ids.size(-1))[None])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(rotary), "forward", by_index)
        assert "would compute something else on shards" in refusal(model)
