"""``ci/faults/fuzz_huggingface.py``: some cases by day, more by night, and every rope; a planted fault is found."""

from __future__ import annotations

from itertools import count
from typing import Any

import fuzz_huggingface
import pytest
import torch
from nightly import NIGHT, each_value
from tiny import differs, model_of, needs_transformers, tokens, train
from ways import WAYS

from cp_plugin import ContextParallel, huggingface

pytestmark = needs_transformers


def run(**options: Any) -> int:
    with pytest.raises(SystemExit) as done:
        fuzz_huggingface.run(**{"examples": 1, "seed": 0, "kind": "", "only": -1, "verbose": False} | options)
    return int(done.value.code or 0)


@pytest.mark.parametrize("kind", ["", "llama", "gemma3_text", "qwen3_next"])
def test_cases_equal_one_rank_or_are_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(examples=200 if NIGHT else 6, seed=3, kind=kind) == 0, capsys.readouterr().out


@pytest.mark.parametrize("way", WAYS)
def test_models_are_called_in_every_way(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    number = next(number for number in count(1) if fuzz_huggingface.draw_case(number, ["llama"]).way == way)
    assert run(kind="llama", only=number) == 0
    outcome = "refused" if way in ("noise", "padded on one rank") else "equal"
    assert f"{number}: {outcome}: " in capsys.readouterr().out


@each_value
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("kind", ["llama", "olmo2", "qwen3"])
@pytest.mark.parametrize("rope", fuzz_huggingface.ropes(8), ids=lambda rope: rope["rope_type"])
def test_every_rope_is_that_of_one_rank(rope: dict[str, Any], kind: str, layout: str) -> None:
    most = 32 if rope["rope_type"] == "dynamic" else 128
    model = model_of(kind, rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=most)
    whole = {"input_ids": tokens(128), "labels": tokens(128)}
    assert differs(model, "ring", 4, whole=whole, layout=layout) <= 2e-5


def test_lengths_that_change_leave_the_same_state() -> None:
    """Dynamic NTK keeps the angles of the longest sequence, until a short one comes."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model, other = (model_of("llama", rope_parameters=parameters, max_position_embeddings=32) for _ in range(2))
    huggingface.apply(other, cp := ContextParallel("ring"))
    for length in (128, 64, 16, 48):
        one = train(model, {"input_ids": tokens(length), "labels": tokens(length)})
        assert train(other, huggingface.shard(cp, tokens(length))).loss == one.loss


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a gradient is lost, which no check of a forward sees."""
    attention = ContextParallel.attention

    def halved(self: ContextParallel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        return attention(self, q, (k + k.detach()) / 2, v, **named)

    monkeypatch.setattr(ContextParallel, "attention", halved)
    assert run(kind="llama") == 1
    assert "WRONG" in capsys.readouterr().out
