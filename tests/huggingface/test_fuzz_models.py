"""``ci/faults/fuzz_huggingface.py``: some cases by day, more by night; a planted fault is found."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import NIGHT
from tiny import needs_transformers

from cp_plugin import ContextParallel

sys.path.append(str(Path(__file__).parents[2] / "ci" / "faults"))

import fuzz_huggingface
from ways import WAYS

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
    number = next(number for number in count(1) if fuzz_huggingface.case_of(number, ["llama"]).way == way)
    assert run(kind="llama", only=number) == 0
    outcome = "refused" if way in ("noise", "padded on one rank") else "equal"
    assert f"{number}: {outcome}: " in capsys.readouterr().out


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a gradient is lost, which no check of a forward sees."""
    attention = ContextParallel.attention

    def halved(self: ContextParallel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        return attention(self, q, (k + k.detach()) / 2, v, **named)

    monkeypatch.setattr(ContextParallel, "attention", halved)
    assert run(kind="llama") == 1
    assert "WRONG" in capsys.readouterr().out
