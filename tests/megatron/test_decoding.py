"""Generation from Megatron models: prefill and decode on several ranks give one rank's logits of whole texts."""

from __future__ import annotations

import contextlib
import runpy
import sys
from functools import cache
from typing import Any

import pytest
import textbook
import torch
from nightly import one_case, slow
from torch import Tensor
from training import DATA, MODEL, SGD

from cp_plugin.linear.variants import variants
from cp_plugin.methods import registry as providers
from cp_plugin.testing.launch import run_ranks

pytestmark = pytest.mark.usefixtures("adapter")

LAYERS = MODEL.replace("--num-layers 2", "--num-layers 4")
TOKENS, NEW = 19, 7
LENGTHS = (TOKENS, 11)
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
    "moe": "--num-experts 4 --moe-router-topk 2",
    "mtp": "--mtp-num-layers 1",
    "tied": "TIED",
    "hybrid": "--cp-linear-attention gla --cp-layer-pattern LN",
    "linear": "--cp-linear-attention retention",
}


def with_model(check: Any, flags: str, ranks: int = 1) -> list[Any]:
    """Start a training, and call ``check`` with the model instead of the first step."""
    words = f"{LAYERS} {DATA} {SGD} --train-iters 1 {flags}"
    if "TIED" in words:
        words = words.replace("TIED", "").replace("--untie-embeddings-and-output-weights", "")
    if "--multi-latent-attention" in words:
        words = words.replace("--group-query-attention --num-query-groups 2", "")

    def rank() -> Any:
        from cp_plugin.megatron import activate

        found = []
        sys.argv = ["pretrain_gpt.py", *words.split()]
        activate()
        from megatron.training import training

        if "--multi-latent-attention" in words and "--cp-provider" not in words:
            textbook.install()

        def train_step(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            found.append(check(model[0]))
            raise SystemExit(0)

        training.train_step = train_step
        with contextlib.suppress(SystemExit):
            runpy.run_module("cp_plugin.pretrain_gpt", run_name="__main__", alter_sys=True)
        return found[0]

    return run_ranks(rank, ranks, timeout=300)


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
        assert so_far.lengths == [length + NEW for length in LENGTHS]
        kept = so_far.nbytes
    return first, torch.cat(after, 1), kept


@cache
def on_one_rank(model: str, tensor_parallel: int = 1) -> tuple[Tensor, Tensor]:
    return with_model(whole, f"{MODELS[model]} --tensor-model-parallel-size {tensor_parallel}", tensor_parallel)[0]


def compare(got: list[Any], want: tuple[Tensor, Tensor]) -> None:
    for rank in got:
        for found, expected in zip(rank[:2], want, strict=True):
            assert ((found - expected).norm() / expected.norm()).item() <= 1e-5
            assert torch.equal(found.argmax(-1), expected.argmax(-1))
            assert torch.equal(found, got[0][0] if found.dim() == 2 else got[0][1]), "ranks differ"


def assert_bytes(got: list[Any], of_token: int) -> None:
    """Each of 4 layers keeps this rank's part of the context, for both sequences."""
    slots = -(-(TOKENS + NEW) // len(got))
    assert [rank[2] for rank in got] == [2 * slots * of_token * 4] * len(got)


@one_case
@pytest.mark.parametrize("name", providers.names())
def test_every_provider(name: str) -> None:
    compare(with_model(stepwise, f"--context-parallel-size 4 --cp-provider {name}", 4), on_one_rank("gqa"))


@one_case
@pytest.mark.parametrize("variant", sorted(variants(), key=lambda name: name != "gla"))
def test_every_kind_of_linear_attention(variant: str) -> None:
    MODELS[variant] = f"--cp-linear-attention {variant} --cp-layer-pattern LLLN"
    compare(with_model(stepwise, f"{MODELS[variant]} --context-parallel-size 2", 2), on_one_rank(variant))


@slow
def test_eight_ranks() -> None:
    got = with_model(stepwise, "--context-parallel-size 8 --cp-provider striped", 8)
    compare(got, on_one_rank("gqa"))
    assert_bytes(got, 2 * 2 * 16 * 4)


@slow
def test_tensor_parallel_ranks_beside_context_parallel_ones() -> None:
    flags = f"{MODELS['hybrid']} --tensor-model-parallel-size 2 --context-parallel-size 2"
    compare(with_model(stepwise, flags, 4), on_one_rank("hybrid", tensor_parallel=2))


def too_long(model: torch.nn.Module) -> str:
    from cp_plugin.megatron.inference.decoding import decoding

    with torch.inference_mode(), decoding(model, batch=1, context=16) as so_far:
        so_far.prefill(text(1)[:, :14])
        so_far.extend(text(1)[:, 14:16])
        with pytest.raises(ValueError) as refused:
            so_far.extend(text(1)[:, 16:17])
    return str(refused.value)


def test_a_context_longer_than_the_cache_says_how_many_ranks_it_needs() -> None:
    for said in with_model(too_long, "--context-parallel-size 2 --cp-provider ring", 2):
        assert "a context of 17 tokens does not fit" in said and "2 context-parallel ranks with 8 slots each" in said
        assert "it needs 3 ranks, or 9 slots on each of these" in said


@one_case
@pytest.mark.parametrize("model", [model for model in MODELS if model != "gqa"])
def test_every_kind_of_model(model: str) -> None:
    chosen = "" if model == "linear" else "--cp-provider striped" if "linear" not in MODELS[model] else ""
    got = with_model(stepwise, f"{MODELS[model]} --context-parallel-size 2 {chosen}", 2)
    compare(got, on_one_rank(model))
    if model == "mla":  # the latent vector: 80 bytes a token, where keys and values would take 416
        assert_bytes(got, (16 + 4) * 4)
