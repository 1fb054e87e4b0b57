"""Medians of calls that take turns, so that a change of clocks meets them all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], object]


def medians(calls: Mapping[str, Call], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Milliseconds of every call on the device.

    Args:
        rounds: in each of which every call is timed once.
        warm_up: rounds before, in which kernels are compiled and memory is reserved; none on the CPU.
    """
    for _ in range(warm_up if torch.cuda.is_available() else 0):
        for call in calls.values():
            call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(_once(call))
    return {name: statistics.median(times) for name, times in found.items()}


def _once(call: Call) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
