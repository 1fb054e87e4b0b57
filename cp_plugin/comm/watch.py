"""Communication that does not end: which message it is, said while Python still can.

On CUDA ``wait`` only makes the stream wait: the program goes on, and a message that never comes shows wherever the host
next looks at the device, until NCCL's own watchdog ends the process and names that place. A ``Watch`` keeps what has
not ended, in the order in which it was waited for, so that another thread can look at the oldest in time.
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
    """What one rank waits for. One thread adds to it, any other may ask."""

    def __init__(self) -> None:
        self._under_way: deque[_Entry] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def blocking(self, named: Callable[[], object]) -> Iterator[None]:
        """The ``with`` block ends when a message does. ``str(named())`` is the message's name."""
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
        """The oldest message that has not ended, if it is waited for so long, with the time; None: there is none."""
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
