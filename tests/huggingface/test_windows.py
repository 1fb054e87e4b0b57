"""What a layer may see is read from the mask that transformers would have made of it.

Kind: what begins beyond the length of the check, or is known to the mask only. A window of 80 tokens in Phi-MoE, whose
layers are not told of it, was dropped: 10 to 20 % off at 128 tokens. Public reports: Accelerate 4177, TE 2541.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import each_value
from tiny import EXPERTS, differs, model_of, needs_transformers, refusal, tokens, transformers

from cp_plugin.huggingface.masks import Reader, Sight


def causal(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k <= q


@pytest.mark.parametrize(
    "function, sight",
    [
        (causal, Sight()),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), Sight(6)),
        (lambda b, h, q, k: (k <= q) & (k >= q - 4000), Sight()),
        (lambda b, h, q, k: (q >= 0) & (k >= 0), Sight(None, None)),
        (lambda b, h, q, k: (q - k).abs() <= 3, Sight(3, 3)),
        (lambda b, h, q, k: (k >= q - 1) & (k <= q + 5), Sight(1, 5)),
        (lambda b, h, q, k: k == q, Sight(0, 0)),
    ],
)
def test_a_window_is_read(function: Callable[..., torch.Tensor], sight: Sight) -> None:
    assert Reader().read(function, 96) == sight
    assert Sight.from_tensor(sight.as_tensor()) == sight


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda b, h, q, k: (k <= q) & (k // 32 == q // 32), "not a sliding window"),
        (lambda b, h, q, k: (k <= q) & (k % 2 == 0) | (k == q), "not a sliding window"),
        (lambda b, h, q, k: (k <= q) | ((k < 8) & (q < 8)), "not a sliding window"),
        (lambda b, h, q, k: (k <= q) & ((q != 50) | (k > 3)), "token 50 sees 47 tokens"),
        (lambda b, h, q, k: k < q, "sees nothing"),
    ],
)
def test_other_masks_are_refused(function: Callable[..., torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reader().read(function, 96)


MILLION = 1 << 20


@pytest.mark.parametrize("sight", [Sight(), Sight(4095), Sight(None, None), Sight(70000, 3)])
def test_reading_a_length_costs_the_same_at_any_length(sight: Sight) -> None:
    """All keys of 256 queries of a million tokens took 5 to 9 s and 1 GB."""
    read, reader = 0, Reader()

    def function(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        nonlocal read
        read += max(q.numel(), k.numel())
        far = k - q
        left, right = (1 << 30 if n is None else n for n in (sight.left, sight.right))
        return (far >= -left) & (far <= right)

    for length, most in ((MILLION, 1 << 18), (MILLION, 1 << 12), (MILLION + 8, 1 << 18), (MILLION // 8, 1 << 18)):
        read = 0
        assert reader.read(function, length) == sight and read <= most


FAR: dict[str, Callable[..., torch.Tensor]] = {
    **{f"chunks of {n}": lambda q, k, n=n: (k <= q) & (k // n == q // n) for n in (96, 1024, 4096, 5000, 1 << 18)},
    **{f"every {n}th": lambda q, k, n=n: (k <= q) & ((k % n == 0) | (q - k < 9)) for n in (2, 128)},
    "a hole": lambda q, k: (k <= q) & ~((k > 300_000) & (k < 310_000) & (k < q)),
    "first tokens": lambda q, k: (k <= q) & ((q - k < 4096) | (k < 4)),
    "a prefix": lambda q, k: (k <= q) | ((k < 9) & (q < 9)),
    "a smaller window later": lambda q, k: (k <= q) & (q - k < torch.where(q > MILLION // 3, 100, 90)),
    "holes in a window": lambda q, k: (k <= q) & (q - k < 4096) & ((k // 64) % 8 > 0) | (q == k),
    "documents": lambda q, k: (k <= q) & ((k < 700_001) == (q < 700_001)),
}


@pytest.mark.parametrize("name", FAR)
def test_other_masks_of_a_million_tokens_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a sliding window"):
        Reader().read(lambda b, h, q, k: FAR[name](q, k), MILLION)


def test_another_tensor_is_no_window() -> None:
    assert Sight.from_tensor(torch.zeros(1, 1, 1, 8, dtype=torch.int64)) is None
    assert Sight.from_tensor(torch.ones(1, 1, 4, 4)) is None
    assert Sight.from_tensor(Sight(5).as_tensor() + 2) is None


WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-MoE, in the mask only": ("phimoe", {**EXPERTS, "num_local_experts": 4, "sliding_window": 80}),
    "Mistral": ("mistral", {"sliding_window": 80}),
    "Mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4, "sliding_window": 33}),
    "Qwen 2, in one layer": ("qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    "Phi 3": ("phi3", {"sliding_window": 70}),
    "gpt-oss": ("gpt_oss", {**EXPERTS, "num_local_experts": 4, "sliding_window": 40}),
    "Olmo 3": ("olmo3", {"sliding_window": 20}),
    "Cohere 2": ("cohere2", {"sliding_window": 70}),
}


@needs_transformers
@each_value
@pytest.mark.parametrize("provider", ["ring", "needed", "striped", "ulysses"])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_followed(name: str, provider: str) -> None:
    kind, more = WINDOWED[name]
    whole = {"input_ids": tokens(128), "labels": tokens(128)}
    model = model_of(kind, **more).eval()  # in training Phi-MoE draws its experts
    assert differs(model, provider, whole=whole) <= 2e-5


@needs_transformers
def test_a_window_that_only_the_layer_knows_is_refused() -> None:
    """Planted: the layer's attention has a window that its mask has not, beyond the 16 tokens per rank of the first
    check. Transformers' own implementations differ then, too."""
    model = model_of("llama", sliding_window=80)
    import sys

    module = sys.modules[type(model).__module__]
    own = module.eager_attention_forward

    def windowed(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any) -> Any:
        rows = torch.arange(q.size(2))
        far = rows[:, None] - rows >= 80
        return own(layer, q, k, v, mask.masked_fill(far, torch.finfo(q.dtype).min), **named)

    model.set_attn_implementation("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "eager_attention_forward", windowed)
        assert "attention differs between 2 ranks and one in LlamaAttention 1" in refusal(model)


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cap_on_scores_is_seen_in_any_dtype(dtype: torch.dtype) -> None:
    """Planted: transformers' attention caps its scores, and does not say so to ours. At random initialisation scores
    are far below the cap."""
    import sys

    model = model_of("llama", dtype)
    model.set_attn_implementation("eager")

    def capped(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any) -> Any:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
        scores = 8 * torch.tanh(q @ k.mT * named["scaling"] / 8) + mask
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(model).__module__], "eager_attention_forward", capped)
        assert "attention differs between 2 ranks and one" in refusal(model)


@needs_transformers
def test_a_mask_of_blocks_is_refused() -> None:
    """Llama 4's chunks, under a name that says nothing of it."""
    model = model_of("llama")
    import sys

    module = sys.modules["transformers.models.llama.modeling_llama"]
    chunked = transformers.masking_utils.create_chunked_causal_mask
    model.config.attention_chunk_size = 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "create_causal_mask", chunked)
        assert "a mask that is not a sliding window" in refusal(model)
