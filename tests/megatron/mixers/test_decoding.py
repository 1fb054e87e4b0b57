"""Generation from Megatron models: prefill and decode on several ranks give one rank's logits of whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from nightly import NIGHT, nightly, one_case
from torch import Tensor
from training import LATENT, MODEL, train

from cp_plugin.engine.linear.variants import variants
from cp_plugin.engine.methods import registry as providers

pytestmark = pytest.mark.usefixtures("adapter")

LAYERS = MODEL.replace("--num-layers 2", "--num-layers 4")
TOKENS, NEW = 19, 7
LENGTHS = (TOKENS, 11)
LONG = 256 if NIGHT else 32
PROMPTS = ((5, 80, 3, 11, 99, 42, 7, 19, 20, 21, 3), (64, 1, 90))
MLA = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 10 --no-rope-fusion"
)
MODELS = {
    "gqa": "",
    "mla": f"{MLA} --rope-type rope",
    "mla yarn": f"{MLA} --rope-type yarn --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.3 --qk-layernorm",
    "learned positions": "--position-embedding-type learned_absolute",
    "window": "--window-size 6,0",
    "sink": "--softmax-type off-by-one",
    "capped scores": "CAPPED --init-method-std 0.2",
    "moe": "--num-experts 4 --moe-router-topk 2",
    "mtp": "--mtp-num-layers 1",
    "tied": "TIED",
    "hybrid": "--cp-linear-attention gla --cp-layer-pattern LN",
    "linear": "--cp-linear-attention retention",
}
EIGHT_HEADS = {
    "gqa": "--num-attention-heads 16 --num-query-groups 8",
    "mla": "--num-attention-heads 8 --init-method-std 0.15",  # with smaller weights it repeats one token
    "hybrid": "--num-attention-heads 16 --num-query-groups 8",
}
"""Of keys, or of latent attention, for head axes of up to eight ranks."""


def with_model(ask: Any, flags: str, ranks: int = 1, prepare: Callable[[], None] | None = None) -> list[Any]:
    """Return what ``ask`` tells of a model of four layers on every rank (``training.train``)."""
    modules = ["scripts:cap_scores"] if "CAPPED" in flags else []
    if LATENT in flags and "--cp-provider" not in flags:
        modules.append("textbook")
    model = LAYERS.replace("--untie-embeddings-and-output-weights ", "") if "TIED" in flags else LAYERS
    words = flags.replace("CAPPED", "").replace("TIED", "")
    records = train(ranks, words, model=model, modules=modules, prepare=prepare, ask=ask)
    return [record.result for record in records]


def text(batch: int = 2) -> Tensor:
    return torch.randint(0, 100, (batch, TOKENS + NEW), generator=torch.Generator().manual_seed(0))


def whole(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Logits after each prompt, and after each new token, of whole texts at once."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    tokens, first, after = text(), [], []
    with torch.no_grad():
        for sequence, length in enumerate(LENGTHS):
            own = torch.cat((tokens[sequence, :length], tokens[sequence, TOKENS:]))[None]
            positions = torch.arange(own.size(1)).expand_as(own)
            logits = gather_from_tensor_model_parallel_region(model(own, positions, None))[0]
            first.append(logits[length - 1])
            after.append(logits[length:])
    return torch.stack(first), torch.stack(after)


def stepwise(model: torch.nn.Module) -> tuple[Tensor, Tensor, int]:
    """The same by prefill in two chunks, then decoding of one, one, two and three tokens; and the cache's bytes."""
    from cp_plugin.megatron.inference.decoding import decoding

    tokens, after = text(), []
    with torch.inference_mode(), decoding(model, batch=2, context=TOKENS + NEW) as so_far:
        first = so_far.prefill(tokens[:, :TOKENS], LENGTHS, chunk=10)
        for part in (slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 7)):
            after.append(so_far.extend(tokens[:, TOKENS:][:, part]))
        assert so_far.session.lengths == [length + NEW for length in LENGTHS]
        kept = so_far.nbytes
    return first, torch.cat(after, 1), kept


def greedy(model: torch.nn.Module) -> list[list[int]]:
    """Continuations of two prompts by the caches."""
    from cp_plugin.megatron.inference.decoding import decoding

    lengths = [len(prompt) for prompt in PROMPTS]
    prompts = torch.tensor([(*prompt, *[0] * (max(lengths) - len(prompt))) for prompt in PROMPTS])
    with torch.inference_mode(), decoding(model, batch=len(PROMPTS), context=max(lengths) + LONG) as so_far:
        tokens = [so_far.prefill(prompts, lengths, chunk=6).argmax(-1)]
        for _ in range(LONG - 1):
            tokens.append(so_far.extend(tokens[-1][:, None])[:, -1].argmax(-1))
        return torch.stack(tokens, 1).tolist()


def greedy_without_caches(model: torch.nn.Module) -> list[list[int]]:
    """The same by Megatron's forward of the whole text for every token."""
    texts = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = torch.tensor(prompt)[None]
            for _ in range(LONG):
                logits = model(tokens, torch.arange(tokens.size(1))[None], None)
                tokens = torch.cat((tokens, logits[:, -1:].argmax(-1)), 1)
            texts.append(tokens[0, len(prompt) :].tolist())
    return texts


@cache
def alone(flags: str, ask: Any = whole) -> Any:
    return with_model(ask, flags)[0]


def compare(got: list[Any], want: tuple[Tensor, Tensor]) -> None:
    for rank in got:
        for logits, expected in zip(rank[:2], want, strict=True):
            assert ((logits - expected).norm() / expected.norm()).item() <= 1e-5
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))
            assert torch.equal(logits, got[0][0] if logits.dim() == 2 else got[0][1]), "ranks differ"


def assert_bytes(got: list[Any], of_token: int) -> None:
    """Each of 4 layers keeps this rank's part of the context, for both sequences."""
    slots = -(-(TOKENS + NEW) // len(got))
    assert [rank[2] for rank in got] == [2 * slots * of_token * 4] * len(got)


def pairs() -> Iterator[tuple[str, str]]:
    """Models and providers; a hybrid model has one layout for both kinds of its layers."""
    of_linear_layers = set(providers.get("lasp2").layouts)
    for model in EIGHT_HEADS:
        for provider in providers.names():
            if model != "hybrid" or of_linear_layers & set(providers.get(provider).layouts):
                yield model, provider


@one_case
@pytest.mark.parametrize("ranks", [4, 2, 8])
@pytest.mark.parametrize(("model", "provider"), pairs())
def test_every_provider(model: str, provider: str, ranks: int) -> None:
    """Logits: 1e-5, and the same on all ranks; texts are identical."""
    flags = f"{MODELS[model]} {EIGHT_HEADS[model]}"
    divided = f"{flags} --context-parallel-size {ranks} --cp-provider {provider}"
    got = with_model(lambda model: (stepwise(model), greedy(model)), divided, ranks)
    compare([logits for logits, _ in got], alone(flags))
    if provider == "striped":
        assert_bytes([logits for logits, _ in got], {"gqa": 2 * 8 * 4, "mla": 16 + 4}[model] * 4)
    texts = alone(flags, ask=greedy_without_caches)
    assert all(len(set(text)) >= 5 for text in texts), "a text of one token over and over shows nothing"
    assert [text for _, text in got] == [texts] * ranks


@one_case
@pytest.mark.parametrize("variant", sorted(variants(), key=lambda name: name != "gla"))
def test_every_kind_of_linear_attention(variant: str) -> None:
    flags = f"--cp-linear-attention {variant} --cp-layer-pattern LLLN"
    compare(with_model(stepwise, f"{flags} --context-parallel-size 2", 2), alone(flags))
    compare(with_model(stepwise, flags), alone(flags))


@nightly
def test_tensor_parallel_ranks_beside_context_parallel_ones() -> None:
    flags = f"{MODELS['hybrid']} --tensor-model-parallel-size 2"
    compare(with_model(stepwise, f"{flags} --context-parallel-size 2", 4), with_model(whole, flags, 2)[0])


def too_long(model: torch.nn.Module) -> str:
    from cp_plugin.megatron.inference.decoding import decoding

    with torch.inference_mode(), decoding(model, batch=1, context=16) as so_far:
        so_far.prefill(text(1)[:, :14])
        so_far.extend(text(1)[:, 14:16])
        with pytest.raises(ValueError) as refused:
            so_far.extend(text(1)[:, 16:17])
    return str(refused.value)


@one_case
@pytest.mark.parametrize("model", [model for model in MODELS if model != "gqa"])
def test_every_kind_of_model(model: str) -> None:
    """And a context longer than the cache says how many ranks it needs."""
    chosen = "" if "linear" in MODELS[model] else "--cp-provider striped"
    divided = f"{MODELS[model]} --context-parallel-size 2 {chosen}"
    got = with_model(lambda model: (stepwise(model), too_long(model)), divided, 2)
    compare([logits for logits, _ in got], alone(MODELS[model]))
    if model == "mla":  # the latent vector: 80 bytes a token, where keys and values would take 416
        assert_bytes([logits for logits, _ in got], (16 + 4) * 4)
    for _, said in got:
        assert "a context of 17 tokens does not fit" in said and "2 context-parallel ranks with 8 slots each" in said
        assert "it needs 3 ranks, or 9 slots on each of these" in said
