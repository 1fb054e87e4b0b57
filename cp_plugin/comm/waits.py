"""How long messages were under way, and how long this rank stood still for them.

    posted ........... needed ------ there         waited: needed to there        under way: posted to there
           computes           waits

On CUDA the three are events in the current stream, which is what waits there, and not the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

type Instant = float | torch.cuda.Event


class Waited(NamedTuple):
    """Seconds, summed over messages."""

    waited: float = 0.0
    under_way: float = 0.0


class Waits:
    """The sum over all messages since the last ``reset``."""

    def __init__(self) -> None:
        self._open: list[tuple[Instant, Instant, Instant]] = []
        self._total = Waited()

    def timed[T](self, finish: Callable[[], T], *, cuda: bool) -> Callable[[], T]:
        """``finish`` of a message that is posted now, which books its time when it is called."""
        posted = _now(cuda)

        def finish_and_book() -> T:
            needed = _now(cuda)
            result = finish()
            self._open.append((posted, needed, _now(cuda)))
            return result

        return finish_and_book

    def total(self) -> Waited:
        """So far. On CUDA this waits for the device; until it is called, every message keeps three events."""
        booked, self._open = self._open, []
        for posted, needed, there in booked:
            waited, under_way = self._total
            self._total = Waited(waited + _seconds(needed, there), under_way + _seconds(posted, there))
        return self._total

    def reset(self) -> None:
        """Forget everything."""
        self._open, self._total = [], Waited()


def _now(cuda: bool) -> Instant:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Instant, end: Instant) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
