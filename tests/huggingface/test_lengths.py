"""Angles and scales are those of the whole sequence.

Kind: whatever is computed from the length of a shard, or from indices in it. Dynamic NTK took each rank's own largest
position: q_proj was 0.5 to 34 % off, and the rank with the last token was right. LongRoPE changes its factors beyond
the original length in the same way.
"""

from __future__ import annotations

from typing import Any

import pytest
from nightly import each_value
from tiny import differs, model_of, needs_transformers, tokens, train

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
