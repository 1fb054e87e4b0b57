"""ci/perf/ratios.py on short sequences: both sides agree and are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch


@pytest.fixture
def ratios(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/perf/ratios")


def test_both_sides_are_timed(ratios: ModuleType) -> None:
    short = replace(ratios.TWO, seq_length=256)
    for found in (
        ratios.on_two_ranks("a", "ring:layout=contiguous", "striped", 0.0, 1, short),
        ratios.overhead(torch.bfloat16, 1, short),
    ):
        assert found.baseline > 0 and found.ours > 0
        assert found._replace(ours=1.0, baseline=found.wanted).ok
        assert not found._replace(ours=1.0, baseline=found.wanted - 0.01).ok
