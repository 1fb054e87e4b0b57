"""Seconds of calls that take turns, on every rank at once: by CUDA's events, or by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

Call = Callable[[Callable[[], object]], object]
"""A forward and a backward; what it is given is called in between."""


class Both(NamedTuple):
    """Seconds, or what follows from them."""

    forward: float
    total: float
    """Forward and backward."""


def take_turns(
    calls: Sequence[Call], rounds: int, device: torch.device, shown: Callable[[int], object]
) -> list[list[Both]]:
    """Every call's seconds, round by round; the order turns by one in each. Collective over all ranks.

    Args:
        shown: told the number of the call that comes next.
    """
    found: list[list[Both]] = [[] for _ in calls]
    for turn in range(rounds):
        first = turn % len(calls)
        for number in (*range(first, len(calls)), *range(first)):
            shown(number)
            found[number].append(once(calls[number], device))
    return found


def once(call: Call, device: torch.device) -> Both:
    """All ranks begin together."""
    dist.barrier()
    if device.type == "cuda":
        return _on_cuda(call)
    times = [time.perf_counter()]
    call(lambda: times.append(time.perf_counter()))
    start, middle, end = *times, time.perf_counter()
    return Both(middle - start, end - start)


def _on_cuda(call: Call) -> Both:
    torch.cuda.synchronize()
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    call(middle.record)
    end.record()
    end.synchronize()
    return Both(start.elapsed_time(middle) / 1e3, start.elapsed_time(end) / 1e3)
