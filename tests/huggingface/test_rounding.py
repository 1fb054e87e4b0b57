"""Models that only round otherwise in shards are not refused; their roundings are those of one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import difference, differs, model_of, needs_transformers, on_ranks, tokens, train

from cp_plugin import huggingface
from cp_plugin.huggingface.structure import allowed, apart

pytestmark = needs_transformers


def with_float32_logits() -> Any:
    model = model_of("qwen3", torch.bfloat16)
    model.lm_head.register_forward_hook(lambda layer, args, output: output.float())
    return model


MODELS = {"float32 logits": with_float32_logits, "experts": lambda: model_of("gpt_oss", torch.bfloat16)}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16_are_accepted(name: str) -> None:
    on_ranks(partial(huggingface.apply, MODELS[name]()), "striped", 4)


def test_delta_nets_in_bfloat16() -> None:
    """Loss and gradients as near to those of float32 as one rank's, where shards on their own were 10 to 110 % off."""
    whole = {"input_ids": tokens(), "labels": tokens()}
    exact, one = (train(model_of("qwen3_next", dtype), whole) for dtype in (torch.float32, torch.bfloat16))
    assert differs(model_of("qwen3_next", torch.bfloat16), one=exact) <= 1.5 * difference(one, exact) + 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_tokens_may_round_otherwise_in_16_bits(dtype: torch.dtype) -> None:
    want = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0))
    for count, found in ((4, dtype == torch.float32), (16, True)):
        got = want.clone()
        got[:, :count] *= 1.5
        assert (apart(want, got, 2, dtype) > allowed(dtype)) == found
    assert not apart(want, want * float("nan"), 2, dtype) <= allowed(dtype)
