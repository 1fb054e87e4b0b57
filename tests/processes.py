"""Processes that a test starts and ends, and waiting for what they do."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], limit: float = 60.0) -> None:
    """AssertionError if it has not come true after so many seconds."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited for {limit:.0f} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Return True if a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def interruptible() -> None:
    """As ``preexec_fn``: SIGINT is not ignored, as in background jobs of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
