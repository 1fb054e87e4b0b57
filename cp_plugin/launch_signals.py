"""SIGTERM at the process that forked ranks is for the ranks: they end of it, or write a checkpoint first and then end.

Without this the launcher would die alone: its ranks with it, but not what they started, such as the processes that
write a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence


@contextlib.contextmanager
def passing_on_sigterm(pids: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Inside the ``with`` block SIGTERM goes on to these processes; in the main thread only, which alone can say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _: object) -> None:
        for pid in pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
