"""Fine-tuning by Bridge's own loop: context-parallel losses and gradients are those of one rank without the plugin.

Whole models and adapters, on examples of one prompt and answer each, and on packs of them that Bridge makes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from bridge_harness import Record, check_same, train, use_examples, write
from nightly import nightly

from cp_plugin.testing.launch import RankError

RING, STRIPED = {"provider": "ring", "layout": "zigzag"}, {"provider": "striped"}
GRID = {"provider": "attention2d", "grid": "2x2"}
PLACED = {"provider": "needed", "layout": "documents"}
PACK = 64
DATA = {"examples": {}, "packs": {"packed": PACK}, "packs of padded examples": {"packed": PACK, "pad_each_to": 4}}


Training = Callable[[str, str], Callable[[Any], None]]
"""Kind of data, and name of a class of Bridge's adapters (empty: the whole model is trained) -> changes of a config."""


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """On a checkpoint of a model that has no adapters."""
    examples, pretrained = write(tmp_path_factory.mktemp("examples")), str(tmp_path_factory.mktemp("pretrained"))

    def save(config: Any) -> None:
        config.checkpoint.save, config.checkpoint.save_interval = pretrained, 1

    def change(data: str, adapters: str, config: Any) -> None:
        from megatron.bridge.peft.utils import create_peft

        use_examples(config, examples, **DATA[data])
        if adapters:
            config.peft = create_peft({"type": adapters, "dim": 4, "alpha": 8, "lora_B_init_method": "normal"})
            config.checkpoint.pretrained_checkpoint = pretrained

    train(1, change=save, steps=1)
    return lambda data, adapters: partial(change, data, adapters)


@pytest.fixture(scope="module")
def alone(training: Training) -> Callable[[str, str], Record]:
    """Kind of data and of adapters -> the training on one rank."""
    counted = {"calculate_per_token_loss": True}  # as `apply` sets it
    return cache(lambda data, adapters: train(1, model=counted, change=training(data, adapters))[0])


@pytest.mark.parametrize(
    ("data", "adapters", "ranks", "arguments"),
    [
        ("examples", "", 2, RING),
        ("packs of padded examples", "", 2, STRIPED),
        ("packs of padded examples", "", 2, PLACED),
        ("packs", "lora", 2, RING),
        pytest.param("packs", "", 4, GRID, marks=nightly),
        pytest.param("packs", "lora", 4, PLACED, marks=nightly),
        pytest.param("packs of padded examples", "", 2, RING, marks=nightly),
        pytest.param("examples", "lora", 2, STRIPED, marks=nightly),
        pytest.param("packs of padded examples", "lora", 4, GRID, marks=nightly),
        pytest.param("examples", "canonical_lora", 2, RING, marks=nightly),
        pytest.param("examples", "dora", 2, STRIPED, marks=nightly),
    ],
)
def test_losses_and_gradients(
    data: str, adapters: str, ranks: int, arguments: Any, training: Training, alone: Callable[[str, str], Record]
) -> None:
    reference = alone(data, adapters)
    assert all("adapter" in name for name in reference.grads) == bool(adapters)
    check_same(train(ranks, arguments, change=training(data, adapters)), reference)


def _documents_run_on() -> None:
    from cp_plugin.megatron.micro_batch import Documents

    Documents.bounds = property(lambda pack: torch.tensor([0, pack.tokens]))  # type: ignore[assignment]


def test_the_self_check_finds_attention_beyond_a_document(training: Training) -> None:
    with pytest.raises(RankError, match=r"layer 1, head \d: out of \d+ of 16 rows"):
        train(2, STRIPED, change=training("packs", ""), prepare=_documents_run_on)
