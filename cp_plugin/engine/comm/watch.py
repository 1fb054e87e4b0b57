"""Watch: name a message that does not end while Python still can.

On CUDA ``wait`` only makes the stream wait: the host goes on, and a message that never arrives shows up wherever the
host next synchronises, until NCCL's watchdog ends the process and names that place. And the first message between two
ranks makes the host wait inside NCCL, before the watchdog knows of it. A ``Watch`` keeps both, so that another thread
can name the oldest in time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class _Message(NamedTuple):
    since: float
    named: Callable[[], object]


class Watch:
    """What one rank is waiting for. One thread at a time adds to it, others may ask.

    CUDA is asked which messages have ended by the thread that adds one: a message is never posted while a CUDA graph is
    captured, when a query in any thread invalidates the capture. Each addition asks about one message more than have
    ended, so what is kept are the messages under way. Other threads ask about overdue messages only.
    """

    def __init__(self) -> None:
        self._blocking: _Message | None = None
        self._in_stream: deque[tuple[_Message, torch.cuda.Event]] = deque()  # each with the end of the stream's wait
        self._lock = threading.Lock()  # of the deque

    @contextmanager
    def blocking(self, named: Callable[[], object]) -> Iterator[None]:
        """The host may wait for the message ``str(named())`` until the end of the ``with`` block."""
        self._blocking = _Message(time.monotonic(), named)
        try:
            yield
        finally:
            self._blocking = None

    def mark_wait(self, named: Callable[[], object]) -> None:
        """The current CUDA stream waits for a message from here on."""
        passed = torch.cuda.Event()
        passed.record()
        message = _Message(time.monotonic(), named)
        with self._lock:
            self._forget_ended(before=message.since)
            self._in_stream.append((message, passed))

    def overdue(self, seconds: float) -> str | None:
        """The oldest unfinished message and its time, if it is ``seconds`` old; otherwise None.

        The calling thread must be on the CUDA device of the messages (``common.background``).
        """
        now = time.monotonic()
        with self._lock:
            self._forget_ended(before=now - seconds)
            in_stream = self._in_stream[0][0] if self._in_stream else None
        waiting = [message for message in (self._blocking, in_stream) if message is not None]
        oldest = min(waiting, key=lambda message: message.since, default=None)
        if oldest is None or now - oldest.since < seconds:
            return None
        return f"{oldest.named()} has not ended after {now - oldest.since:.0f} s"

    def _forget_ended(self, before: float) -> None:
        """Forget the messages up to the first that has not ended, or is younger, about which CUDA is not asked."""
        while self._in_stream:
            message, passed = self._in_stream[0]
            if message.since > before or not passed.query():
                return
            self._in_stream.popleft()
