"""The traffic ledger: what each rank sent, by phase, verb and mesh axis, and how long it waited for messages.

Every verb of every mesh records here, so that a real run, a traced run and a closed formula can be held equal. Bytes
are exact and count what this rank *sends* with a bandwidth-optimal algorithm (for all verbs it receives as many).

    posted ........... needed ------ there         waited: needed to there        under way: posted to there
           computes           waits

On CUDA these three instants are events in the current stream, which waits there instead of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Traffic(NamedTuple):
    """A line of the ledger."""

    phase: str
    """``forward``, ``backward``, or any name given to ``Ledger.phase``."""
    op: str
    """The verb: exchange, send, all_gather, reduce_scatter, all_to_all or all_to_all_v."""
    axis: str
    calls: int
    bytes: int


@dataclass(slots=True)
class _Count:
    calls: int = 0
    bytes: int = 0


class Ledger:
    """Totals per (phase, verb, axis); its size does not grow with the number of steps."""

    waits: Waits | None
    """Records the time of messages; None: time is not measured."""

    def __init__(self) -> None:
        self.waits = None
        self._phase = "forward"
        self._counts: dict[tuple[str, str, str], _Count] = {}
        self._seconds: dict[str, float] = {}

    @property
    def current_phase(self) -> str:
        """The phase under which traffic is recorded now."""
        return self._phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record everything sent inside the ``with`` block under ``name``."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def record(self, op: str, axis: str, nbytes: int) -> None:
        """Record one call of a verb."""
        count = self._counts.setdefault((self._phase, op, axis), _Count())
        count.calls += 1
        count.bytes += nbytes

    def record_seconds(self, seconds: float) -> None:
        """Record time taken by the current phase, including computation."""
        self._seconds[self._phase] = self.seconds(self._phase) + seconds

    def seconds(self, phase: str) -> float:
        """Time recorded for a phase."""
        return self._seconds.get(phase, 0.0)

    def entries(self) -> list[Traffic]:
        """All lines, sorted by phase, verb and axis."""
        return [Traffic(*key, count.calls, count.bytes) for key, count in sorted(self._counts.items())]

    def bytes(self, *, phase: str | None = None, axis: str | None = None) -> int:
        """Bytes sent, optionally of one phase or axis only."""
        lines = self.entries()
        return sum(t.bytes for t in lines if phase in (None, t.phase) and axis in (None, t.axis))

    def reset(self) -> None:
        self._counts.clear()
        self._seconds.clear()
        if self.waits is not None:
            self.waits.reset()


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
        """``finish`` of a message posted now, which records the message's time when it is called."""
        posted = _now(cuda)

        def finish_and_book() -> T:
            needed = _now(cuda)
            result = finish()
            self._open.append((posted, needed, _now(cuda)))
            return result

        return finish_and_book

    def total(self) -> Waited:
        """The sum so far. On CUDA this waits for the device; until then every message keeps three events."""
        booked, self._open = self._open, []
        for posted, needed, there in booked:
            waited, under_way = self._total
            self._total = Waited(waited + _seconds(needed, there), under_way + _seconds(posted, there))
        return self._total

    def reset(self) -> None:
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
