"""SIGTERM at the launcher is meant for the ranks: they end, or write a checkpoint first.

Otherwise the launcher would die alone, taking its ranks with it, but not what they started, such as the processes that
write a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def passing_on_sigterm(pids: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Inside the ``with`` block SIGTERM is forwarded to these processes; only the main thread can arrange that."""
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


def frozen(pid: int) -> bool:
    """Whether SIGSTOP or a debugger holds the process, so that it cannot answer a signal."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False
