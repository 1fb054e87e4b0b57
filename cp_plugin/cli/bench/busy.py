"""Whether this machine was ours while we measured."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path


class Processors:
    """Processor time since its creation: of all programs, and of this one with its finished children."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy(), _own()

    def others(self) -> float:
        """The share of all processors' time that other programs took."""
        whole = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return max(0.0, (_busy() - self._busy) - (_own() - self._own)) / whole


def _busy() -> float:
    """Seconds spent by all programs; interrupts, which carry our packets, not included."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
