"""Logits and greedy texts of 256 tokens match one rank's, for all ranks, providers and caches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from nightly import NIGHT, WHY, one_case
from test_decoding import MODELS, compare, stepwise, whole, with_model

from cp_plugin.methods import registry as providers

if not NIGHT:
    pytest.skip(WHY, allow_module_level=True)
pytestmark = pytest.mark.usefixtures("adapter")

NEW, PROMPTS = 256, ((5, 80, 3, 11, 99, 42, 7, 19, 20, 21, 3), (64, 1, 90))
HEADS = {
    "gqa": "--num-attention-heads 16 --num-query-groups 8",
    "mla": "--num-attention-heads 8 --init-method-std 0.15",  # with smaller weights it repeats one token
    "hybrid": "--num-attention-heads 16 --num-query-groups 8",
}
"""Eight heads of keys, or of latent attention, for head axes of up to eight ranks."""


def greedy(model: torch.nn.Module) -> list[list[int]]:
    """Greedy continuations by the caches."""
    from cp_plugin.megatron.inference.decoding import decoding

    lengths = [len(prompt) for prompt in PROMPTS]
    prompts = torch.tensor([(*prompt, *[0] * (max(lengths) - len(prompt))) for prompt in PROMPTS])
    with torch.inference_mode(), decoding(model, batch=len(PROMPTS), context=max(lengths) + NEW) as so_far:
        tokens = [so_far.prefill(prompts, lengths, chunk=6).argmax(-1)]
        for _ in range(NEW - 1):
            tokens.append(so_far.extend(tokens[-1][:, None])[:, -1].argmax(-1))
        return torch.stack(tokens, 1).tolist()


def by_whole_texts(model: torch.nn.Module) -> list[list[int]]:
    """Greedy continuations by Megatron's forward of the whole text for every token."""
    texts = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = torch.tensor(prompt)[None]
            for _ in range(NEW):
                logits = model(tokens, torch.arange(tokens.size(1))[None], None)
                tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
            texts.append(tokens[0, len(prompt) :].tolist())
    return texts


@cache
def logits_on_one_rank(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    return with_model(whole, flags(model))[0]


@cache
def texts_on_one_rank(model: str) -> list[list[int]]:
    texts = with_model(by_whole_texts, flags(model))[0]
    assert all(len(set(text)) >= 5 for text in texts), "a text of one token over and over shows nothing"
    return texts


def pairs() -> Iterator[tuple[str, str]]:
    """Models and providers; a hybrid model has one layout for both kinds of its layers."""
    of_linear_layers = set(providers.get("lasp2").layouts)
    for model in HEADS:
        for provider in providers.names():
            if model != "hybrid" or of_linear_layers & set(providers.get(provider).layouts):
                yield model, provider


def flags(model: str, provider: str = "", ranks: int = 1) -> str:
    chosen = f"--context-parallel-size {ranks} --cp-provider {provider}" if provider else ""
    return f"{MODELS[model]} {HEADS[model]} {chosen}"


@one_case
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("model", "provider"), pairs())
def test_logits_and_texts_match_one_rank(model: str, provider: str, ranks: int) -> None:
    """Logits of a prompt in two parts and of single tokens: 1e-5, and the same on all ranks."""
    words = flags(model, provider, ranks)
    compare(with_model(stepwise, words, ranks), logits_on_one_rank(model))
    assert with_model(greedy, words, ranks) == [texts_on_one_rank(model)] * ranks
