"""ci/perf/ratios.py: on a host whose processors slow down at times, and beside the last release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest


@pytest.fixture
def ratios(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("ci/perf/ratios")


class Host:
    """Slow for ``slow`` moments, at full speed for ``fast`` ones, and so on, each 1 to 1.5 times as long by chance.

    Slow, the fixed computation and ours take twice as long. The baseline does not: as a contiguous ring, it waits for
    another processor.
    """

    def __init__(self, slow: int, fast: int = 10) -> None:
        chance, self.slow_moments, now = Random(0), set[int](), 0
        while slow and now < 10_000:
            now += round(fast * chance.uniform(1, 1.5))
            until = now + round(slow * chance.uniform(1, 1.5))
            self.slow_moments.update(range(now, until))
            now = until
        self.now = 0

    def fixed_computation(self) -> float:
        return 5.0 * self._slowest(1)

    def milliseconds(self, step: Callable[[], float]) -> float:
        return step()

    def baseline(self) -> float:
        self._slowest(4)
        return 100.0

    def ours(self) -> float:
        return 50.0 * self._slowest(2)

    def _slowest(self, moments: int) -> float:
        passed = range(self.now, self.now + moments)
        self.now = passed.stop
        return 1.0 if self.slow_moments.isdisjoint(passed) else 2.0


def measured(host: Host, ratios: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(ratios, "_fixed_computation", host.fixed_computation)
    monkeypatch.setattr(ratios, "milliseconds", host.milliseconds)
    return ratios.alternate(host.baseline, host.ours, rounds=9)


@pytest.mark.parametrize("slow", [0, 3, 6, 12, 30])
def test_only_calls_at_full_speed_count(slow: int, ratios: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(Host(slow), ratios, monkeypatch)
    assert found["at_full_speed"]
    assert (found["baseline_ms"], found["ours_ms"], found["ratio"]) == (100.0, 50.0, 2.0)
    assert (found["calls"] == 9) == (slow == 0)


def test_a_ratio_is_held_to_that_of_the_last_release(ratios: ModuleType, tmp_path: Path) -> None:
    one = ratios.Ratio(
        name="a",
        setup="2 ranks, float32",
        baseline_ms=1.0,
        ours_ms=1.0,
        ratio=1.0,
        wanted=0.9,
        calls=9,
        at_full_speed=True,
    )
    ratios.write_release("1.0", {"a, float32": 1.1}, tmp_path / "released.json")
    (held,) = ratios.held_to([one], ratios.released(tmp_path / "released.json"))
    assert one.ok and not held.ok and held.wanted == pytest.approx(0.97 * 1.1)
