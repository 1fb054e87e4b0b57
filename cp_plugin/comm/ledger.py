"""The traffic ledger: what each rank sent, by phase, verb and mesh axis.

Every verb of every mesh writes here, so that the bytes of a real run, of a traced run and of a closed formula can be
held equal. Counts are exact integers; bytes are those this rank *sends* on the wire with a bandwidth-optimal algorithm
(for all verbs a rank receives as many).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from cp_plugin.comm.waits import Waits


class Traffic(NamedTuple):
    """One line of the ledger."""

    phase: str
    """``forward``, ``backward``, or what ``Ledger.phase`` was last given."""
    op: str
    """The verb: exchange, send, all_gather, reduce_scatter or all_to_all."""
    axis: str
    calls: int
    bytes: int


@dataclass(slots=True)
class _Count:
    calls: int = 0
    bytes: int = 0


class Ledger:
    """Totals per (phase, verb, axis). It does not grow with the number of training steps."""

    waits: Waits | None
    """Where time is booked; None: it is not taken."""

    def __init__(self) -> None:
        self.waits = None
        self._phase = "forward"
        self._counts: dict[tuple[str, str, str], _Count] = {}
        self._seconds: dict[str, float] = {}

    @property
    def current_phase(self) -> str:
        """What is booked now is booked under this name."""
        return self._phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything sent inside the ``with`` block is booked under ``name``."""
        outer, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = outer

    def record(self, op: str, axis: str, nbytes: int) -> None:
        """Book one call of a verb."""
        count = self._counts.setdefault((self._phase, op, axis), _Count())
        count.calls += 1
        count.bytes += nbytes

    def record_seconds(self, seconds: float) -> None:
        """Book time that the current phase has taken, computation included."""
        self._seconds[self._phase] = self.seconds(self._phase) + seconds

    def seconds(self, phase: str) -> float:
        """The time booked for a phase."""
        return self._seconds.get(phase, 0.0)

    def entries(self) -> list[Traffic]:
        """All lines, sorted by phase, verb and axis."""
        return [Traffic(*key, count.calls, count.bytes) for key, count in sorted(self._counts.items())]

    def bytes(self, *, phase: str | None = None, axis: str | None = None) -> int:
        """Bytes sent, optionally of one phase or one axis only."""
        lines = self.entries()
        return sum(t.bytes for t in lines if phase in (None, t.phase) and axis in (None, t.axis))

    def reset(self) -> None:
        """Forget everything."""
        self._counts.clear()
        self._seconds.clear()
        if self.waits is not None:
            self.waits.reset()
