"""Watch: name a message that does not end while Python still can.

On CUDA ``wait`` only makes the stream wait: the host goes on, and a message that never arrives shows up wherever the
host next synchronises, until NCCL's watchdog ends the process and names that place. A ``Watch`` keeps the unfinished
messages in the order in which they were waited for, so that another thread can name the oldest in time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class _Entry(NamedTuple):
    since: float
    named: Callable[[], object]
    done: Callable[[], bool]


class Watch:
    """What one rank is waiting for. One thread adds to it, others may ask."""

    def __init__(self) -> None:
        self._under_way: deque[_Entry] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def blocking(self, named: Callable[[], object]) -> Iterator[None]:
        """The message ``str(named())`` ends with the ``with`` block."""
        ended: list[bool] = []
        self._add(named, lambda: bool(ended))
        try:
            yield
        finally:
            ended.append(True)

    def in_stream(self, named: Callable[[], object]) -> None:
        """The current CUDA stream waits for a message from here on."""
        passed = torch.cuda.Event()
        passed.record()
        self._add(named, passed.query)

    def overdue(self, seconds: float) -> str | None:
        """The oldest unfinished message and its time, if it is ``seconds`` old; otherwise None."""
        with self._lock:
            self._forget_ended()
            oldest = self._under_way[0] if self._under_way else None
        waited = 0.0 if oldest is None else time.monotonic() - oldest.since
        if oldest is None or waited < seconds:
            return None
        return f"{oldest.named()} has not ended after {waited:.0f} s"

    def _add(self, named: Callable[[], object], done: Callable[[], bool]) -> None:
        with self._lock:
            self._forget_ended()
            self._under_way.append(_Entry(time.monotonic(), named, done))

    def _forget_ended(self) -> None:
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
