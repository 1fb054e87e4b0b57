"""Models that only round otherwise in shards are not refused; faults of the same size as their roundings are.

Kind: a limit that is not one of what was rounded. ``apply`` took it from the dtype of the logits, which some models
make float32 of 16-bit numbers, and from all tokens together, of which a router sends a few to other experts where
rounding decides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import Around, built, config_of, needs_transformers, refusal

from cp_plugin import ContextParallel, huggingface
from cp_plugin.huggingface.structure import allowed, apart
from cp_plugin.testing.launch import run_ranks

pytestmark = needs_transformers


def with_float32_logits() -> Any:
    model = built(config_of("qwen3"), torch.bfloat16)
    model.lm_head.register_forward_hook(lambda layer, args, output: output.float())
    return model


MODELS = {"float32 logits": with_float32_logits, "experts": lambda: built(config_of("gpt_oss"), torch.bfloat16)}


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16_are_accepted(name: str) -> None:
    model = MODELS[name]()

    def rank() -> None:
        huggingface.apply(model, ContextParallel("striped", group=dist.group.WORLD))

    run_ranks(rank, 4, init_process_group=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fault_beyond_rounding_is_found(dtype: torch.dtype) -> None:
    model = built(config_of("gpt_oss"), dtype)
    louder = lambda self, x: self.layer(x) * (x.size(1) / 32) ** 0.12  # noqa: E731 (by 8 % on 2 ranks)
    model.lm_head = Around(model.lm_head, louder)
    assert "would compute something else on shards: the results for a token" in refusal(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_few_tokens_may_round_otherwise_in_16_bits(dtype: torch.dtype) -> None:
    want = torch.randn(1, 64, 16, generator=torch.Generator().manual_seed(0))
    for tokens, found in ((4, dtype == torch.float32), (16, True)):
        got = want.clone()
        got[:, :tokens] *= 1.5
        assert (apart(want, got, 2, dtype) > allowed(dtype)) == found
    assert not apart(want, want * float("nan"), 2, dtype) <= allowed(dtype)
