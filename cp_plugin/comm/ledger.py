"""The traffic ledger: what each rank sent, by phase, verb and mesh axis.

Every verb of every mesh records here, so that a real run, a traced run and a closed formula can be held equal. Bytes
are exact and count what this rank *sends* with a bandwidth-optimal algorithm (for all verbs it receives as many).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Traffic(NamedTuple):
    """A line of the ledger."""

    phase: str
    """``forward``, ``backward``, or any name given to ``Ledger.phase``."""
    op: str
    """The verb: exchange, send, all_gather, reduce_scatter, all_to_all or all_to_all_v."""
    axis: str
    calls: int
    bytes: int


class Ledger:
    """Totals per (phase, verb, axis); its size does not grow with the number of steps."""

    def __init__(self) -> None:
        self.current_phase = "forward"
        """The phase under which traffic is recorded now."""
        self._counts: dict[tuple[str, str, str], tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record everything sent inside the ``with`` block under ``name``."""
        outer, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = outer

    def record(self, op: str, axis: str, nbytes: int) -> None:
        """Record one call of a verb."""
        calls, sent = self._counts.get((self.current_phase, op, axis), (0, 0))
        self._counts[self.current_phase, op, axis] = calls + 1, sent + nbytes

    def entries(self) -> list[Traffic]:
        """All lines, sorted by phase, verb and axis."""
        return [Traffic(*key, *count) for key, count in sorted(self._counts.items())]

    def bytes(self, *, phase: str | None = None) -> int:
        """Bytes sent, optionally of one phase only."""
        return sum(line.bytes for line in self.entries() if phase in (None, line.phase))

    def reset(self) -> None:
        self._counts.clear()
