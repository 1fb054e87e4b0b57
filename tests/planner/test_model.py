"""Model catalogue: parameter counts against published ones, and refused sizes and divisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from evidence.experiment import core_flops
from hypothesis import given
from hypothesis import strategies as st

from cp_plugin.planner.training import operations, weights
from cp_plugin.planner.training.footprint import whole
from cp_plugin.planner.training.model import Model, model, models
from cp_plugin.planner.training.parallel import Parallel, check, problem

PUBLISHED = {  # parameters, as the model's own card or paper has them
    "llama2-7b": 6.738e9,
    "llama2-13b": 13.016e9,
    "llama2-70b": 68.977e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.554e9,
    "llama3-405b": 405.85e9,
    "llama3.2-1b": 1.236e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-32b": 32.764e9,
    "qwen2.5-72b": 72.706e9,
    "qwen3-8b": 8.191e9,
    "qwen3-32b": 32.762e9,
    "qwen3-30b-a3b": 30.532e9,
    "qwen3-235b-a22b": 235.09e9,
    "mixtral-8x7b": 46.703e9,
    "deepseek-v3": 671.0e9,
}
ROUNDED = {  # of which only the name, or two digits, are published
    "gpt3-760m": 0.76e9,
    "gpt3-1.3b": 1.3e9,
    "gpt3-2.7b": 2.7e9,
    "gpt3-6.7b": 6.7e9,
    "gpt3-13b": 13.0e9,
    "gpt3-175b": 174.6e9,
    "burstengine-14b": 14.0e9,
    "striped-7b": 6.7e9,
}
PUBLISHED |= ROUNDED
SMALL = Model(name="small", layers=4, hidden=64, heads=8, kv_heads=2, ffn_hidden=128, vocab=1000)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    published = PUBLISHED[name]
    assert whole(model(name)).total == pytest.approx(published, rel=0.02 if name in ROUNDED else 5e-4)


def active(m: Model) -> int:
    return whole(m).total - whole(m).routed + whole(m).routed * m.top_k // m.experts


def test_active_parameters_of_experts() -> None:
    assert active(model("mixtral-8x7b")) == pytest.approx(12.9e9, rel=0.01)
    assert active(model("qwen3-235b-a22b")) == pytest.approx(22e9, rel=0.02)


@pytest.mark.parametrize("m", models().values(), ids=list(models()))
def test_flops_are_twice_the_active_parameters(m: Model) -> None:
    """Per token, beside attention itself and embedding: one multiply-add per weight."""
    assert m.source
    per_token = sum(operations.projections(m, n) + operations.ffn(m, n) for n in m.all_layers)
    per_token += operations.head(m, m.vocab)
    multiplied = active(m) - weights.embedding(m, m.vocab).total + m.tied * m.vocab * m.hidden
    assert per_token == pytest.approx(2 * multiplied, rel=1e-3)  # all but norms and biases


def test_flops_of_attention() -> None:
    m = replace(SMALL, attention_pattern="NW", window=(15, 0))
    assert core_flops(m, 0, 64) == 2 * 8 * (8 + 8) * 64 * 64 / 2
    seen = sum(min(i, 15) for i in range(64))  # a token's half of itself aside
    assert core_flops(m, 1, 64) == pytest.approx(2 * 8 * (8 + 8) * seen, rel=0.05)
    linear = replace(SMALL, attention_pattern="L", linear="lightning")
    assert core_flops(linear, 0, 128) == 2 * core_flops(linear, 0, 64) == 2 * 64 * 2 * (8 + 2) * 8 * 8


def test_nearest_names() -> None:
    assert model("LLaMA3_8B") is model("llama3-8b")
    with pytest.raises(ValueError, match=r"unknown model 'lama3-8b': did you mean llama3-8b.*one of gpt3-760m"):
        model("lama3-8b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, r"layers 0: sizes must be 1 or more"),
        ({"layers": 99_999, "predicted": 2}, r"layers 99999, predicted 2: at most 100,000 together"),
        ({"kv_heads": 3}, r"8 query heads cannot share 3 key/value heads"),
        ({"top_k": 2}, r"top_k 2 of 1 experts"),
        ({"attention_pattern": "LLX"}, r"attention_pattern 'LLX': use only the letters NWL"),
        ({"attention_pattern": "L"}, r"linear '': .* need one of basic, lightning"),
        ({"attention_pattern": "W"}, r"need window, such as"),
        ({"ffn_pattern": ""}, r"ffn_pattern '': use only the letters DE"),
        ({"rope_dim": -1}, r"rope_dim -1: sizes"),
    ],
)
def test_bad_sizes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^model small: .*{message}"):
        replace(SMALL, **change)


def test_the_problem_of_an_attention_layer() -> None:
    plain = problem(model("llama3-8b"), Parallel(devices=16, tensor=4, context=4, seq_length=8192, micro_batch=2))
    assert (plain.size, plain.heads, plain.kv_heads, plain.head_dim) == (4, 8, 2, 128)
    assert (plain.seq_length, plain.batch, plain.dtype, plain.causal) == (8192, 2, torch.bfloat16, True)
    latent = problem(model("deepseek-v3"), Parallel(devices=8, tensor=8))
    assert (latent.heads, latent.kv_heads, latent.head_dim, latent.v_head_dim) == (16, 16, 192, 128)
    more_ranks_than_heads = problem(replace(SMALL, vocab=8), Parallel(devices=8, tensor=8))
    assert (more_ranks_than_heads.heads, more_ranks_than_heads.kv_heads) == (1, 1)
    mixed = replace(SMALL, attention_pattern="NWL", window=(31, 0), linear="rebased")
    assert problem(mixed, Parallel(), "W").window == (31, 0) and problem(mixed, Parallel(), "N").window is None
    linear = problem(mixed, Parallel(), "L")
    assert (linear.head_dim, linear.v_head_dim) == (136, 9)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"devices": 12, "tensor": 8}, r"12 devices cannot be divided by --tensor-model-parallel-size 8 x"),
        ({"devices": 8, "expert": 3}, r"8 devices cannot be divided by --expert-tensor-parallel-size 1 x"),
        ({"devices": 4, "context": 4, "seq_length": 42}, r"--context-parallel-size 4 does not divide the 42 tokens"),
        ({"devices": 4, "global_batch": 6}, r"--global-batch-size 6 .*1 x 4 data-parallel ranks: use a multiple of 4"),
        ({"recompute_modules": ("mpl",)}, r"recompute_modules mpl: did you mean mlp\?"),
        ({"micro_batch": 0}, r"micro_batch 0: sizes must be 1 or more"),
        ({"devices": 3, "tensor": 3}, r"--tensor-model-parallel-size 3 does not divide the 8 query heads.*2 or 4"),
        ({"devices": 8, "expert": 2}, r"--expert-model-parallel-size 2: small has no experts"),
        ({"devices": 8, "pipeline": 8}, r"--pipeline-model-parallel-size 8 .*only 4 layers"),
        ({"seq_length": 128, "documents": (100, 0, 28)}, "documents of 128 tokens cannot fill a sequence of 128"),
    ],
)
def test_bad_divisions_are_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problem(SMALL, Parallel(**sizes))


def test_key_heads_of_tensor_parallel_ranks() -> None:
    four = Parallel(devices=4, tensor=4)
    check(SMALL, four)  # a multiple of 2
    with pytest.raises(ValueError, match="has 6 key/value heads; use a divisor or a multiple of that"):
        check(replace(SMALL, heads=12, kv_heads=6), four)


@given(
    layers=st.integers(1, 40),
    pipeline=st.integers(1, 8),
    predicted=st.integers(0, 1),
    pattern=st.text("NL", min_size=1),
)
def test_stages_have_every_layer_once(layers: int, pipeline: int, predicted: int, pattern: str) -> None:
    m = replace(SMALL, layers=layers, predicted=predicted, attention_pattern=pattern, linear="basic")
    p = Parallel(devices=pipeline, pipeline=pipeline)
    stages = [p.layers(m, stage) for stage in range(pipeline)]
    assert [n for stage in stages for n in stage] == list(m.all_layers)
    sizes = [len(stage) - predicted * (stage.stop > layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    counted = [m.alike(stage) for stage in stages]
    assert sum(n for stage in counted for n in stage.values()) == layers + predicted
