"""Weights of Hugging Face in Bridge's models: context-parallel logits are those of transformers, the export is exact.

The models are tiny and random; no file is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_harness import tokenizer, train
from nightly import nightly

TOKENS, WORDS = 64, 128
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": WORDS,
    "max_position_embeddings": TOKENS,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
NAMES = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}


def _imported(name: str, folder: Path) -> tuple[Any, Any]:
    """A random model of transformers, saved in the folder and imported again by Bridge."""
    import transformers
    from megatron.bridge import AutoBridge

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, NAMES[name])(**SIZES))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model, AutoBridge.from_hf_pretrained(folder)


def _tokens() -> torch.Tensor:
    return torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(4))


def _watch(bridge: Any, folder: Path) -> Callable[[Any], None]:
    """A callback that computes logits of this rank's tokens and exports the weights."""

    def compute_and_export(context: Any) -> None:
        import torch.distributed as dist
        from megatron.bridge.training.utils.pg_utils import get_pg_collection
        from megatron.core import utils

        batch = {"tokens": _tokens(), "position_ids": torch.arange(TOKENS).expand(2, -1)}
        group = get_pg_collection(context.model).cp
        part = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
        with torch.no_grad():
            logits = context.model[0](part["tokens"], part["position_ids"], None)
        torch.save((part["position_ids"][0], logits), folder / f"logits{dist.get_rank()}")
        bridge.save_hf_pretrained(context.model, folder / "exported", show_progress=False)

    return compute_and_export


def _load_weights(bridge: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        size = config.model.context_parallel_size
        config.model = bridge.to_megatron_provider(load_weights=True)
        config.model.context_parallel_size, config.model.seq_length = size, TOKENS

    return change


@pytest.mark.parametrize(
    ("name", "ranks", "arguments"),
    [
        ("llama", 2, {"provider": "ring", "layout": "zigzag"}),
        pytest.param("qwen3", 2, {"provider": "striped"}, marks=nightly),
        pytest.param("qwen3", 4, {"provider": "attention2d", "grid": "2x2"}, marks=nightly),
    ],
)
def test_logits_and_export(name: str, ranks: int, arguments: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, bridge = _imported(name, tmp_path / "model")
    with torch.no_grad():
        logits = model(_tokens()).logits
    events = {"on_train_start": _watch(bridge, tmp_path)}
    train(ranks, arguments, change=_load_weights(bridge), events=events, steps=1)
    seen = []
    for rank in range(ranks):
        places, part = torch.load(tmp_path / f"logits{rank}")
        torch.testing.assert_close(part, logits[:, places], rtol=1e-4, atol=1e-5)
        seen += places.tolist()
    assert sorted(seen) == list(range(TOKENS))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert exported.keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        assert torch.equal(exported[key], weight), key
