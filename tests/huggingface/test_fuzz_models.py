"""``ci/faults/fuzz_huggingface.py``: some cases by day, more by night; a planted fault is found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import NIGHT
from tiny import needs_transformers

from cp_plugin import ContextParallel, huggingface

pytestmark = needs_transformers
sys.path.append(str(Path(__file__).parents[2] / "ci" / "faults"))


def run(**options: Any) -> int:
    import fuzz_huggingface

    with pytest.raises(SystemExit) as done:
        fuzz_huggingface.run(**{"examples": 1, "seed": 0, "kind": "", "only": -1, "verbose": False} | options)
    return int(done.value.code or 0)


@pytest.mark.parametrize("kind", ["", "llama", "gemma3_text", "qwen3_next"])
def test_cases_equal_one_rank_or_are_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(examples=200 if NIGHT else 6, seed=3, kind=kind) == 0, capsys.readouterr().out


def test_models_are_called_in_every_way() -> None:
    import fuzz_huggingface

    drawn = {fuzz_huggingface.case_of(number, ["llama"]).way for number in range(1, 300)}
    assert drawn == set(fuzz_huggingface.WAYS)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a gradient is lost, which no check of a forward sees."""
    attention = ContextParallel.attention

    def halved(self: ContextParallel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        return attention(self, q, (k + k.detach()) / 2, v, **named)

    monkeypatch.setattr(ContextParallel, "attention", halved)
    assert run(kind="llama") == 1
    assert "WRONG" in capsys.readouterr().out


def of_one_rank() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("of one rank")


@pytest.mark.parametrize(
    "fault, said",
    [
        (of_one_rank, "not a refusal: RuntimeError: of one rank"),
        (lambda: time.sleep(60), "2 of 2 ranks had not finished"),
    ],
    ids=["an error", "a hang"],
)
def test_what_ends_a_case_is_its_own(
    fault: Callable[[], None], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others on the same ranks are judged all the same."""
    import fuzz_huggingface

    apply = huggingface.apply

    def planted(model: Any, cp: ContextParallel) -> None:
        if type(model).__name__.startswith("Qwen3"):
            fault()
        apply(model, cp)

    monkeypatch.setattr(huggingface, "apply", planted)
    monkeypatch.setattr(fuzz_huggingface, "LONGEST", 6)
    assert run(examples=3, kind="llama,qwen3,mistral") == 1
    text = capsys.readouterr().out
    assert f"1: WRONG: {said}" in text and "'equal': 2, 'WRONG': 1" in text, text
