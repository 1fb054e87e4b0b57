"""Settings in checkpoints: differences are announced, other layers refused. test_elastic.py resumes trainings."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from training import train

pytestmark = pytest.mark.usefixtures("adapter")


def test_checkpoint_of_linear_layers_is_refused_for_softmax_layers(tmp_path: Path) -> None:
    basic = "--cp-linear-attention basic --context-parallel-size 2"
    train(2, f"{basic} --make-vocab-size-divisible-by 64 --ckpt-format torch --save {tmp_path} --save-interval 1")
    with pytest.raises(Exception, match="saved with --cp-linear-attention basic --cp-layer-pattern L, but this run"):
        train(1, f"--make-vocab-size-divisible-by 64 --ckpt-format torch --load {tmp_path}", steps=2)


def test_models_and_differences(adapter: None) -> None:
    from cp_plugin.megatron.startup.checkpoint import differences, other_model, saved

    def linear(kind: str, pattern: str) -> dict[str, str]:
        return {"--cp-linear-attention": kind, "--cp-layer-pattern": pattern}

    assert other_model(linear("gla", "LLLN"), linear("gla", "LLLNLLLN"), 8) is None, "the same layers"
    assert other_model(linear("gla", "LLLN"), linear("gla", "LLLNLLLL"), 8)
    assert other_model(linear("gla", "L"), linear("basic", "L"), 2)
    assert other_model({}, linear("basic", "L"), 2)
    assert other_model({"--cp-provider": "ring"}, {"--cp-provider": "upstream"}, 2) is None
    assert differences({"--a": "1", "--b": "2"}, {"--a": "1", "--c": "3"}) == [
        "resumes with --b 2; it was saved without",
        "resumes without --c; it was saved with 3",
    ]
    stock = saved(argparse.Namespace(context_parallel_size=4))
    assert stock == {"--cp-provider": "upstream", "--context-parallel-size": "4"}
