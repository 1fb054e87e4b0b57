"""Timing of calls that take turns: by CUDA events, or by the clock on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

Call = Callable[[Callable[[], object]], object]
"""A forward and a backward pass; its argument is called in between."""


class Both(NamedTuple):
    """Seconds, or a quantity derived from them; ``total``: of forward and backward."""

    forward: float
    total: float


class Taken(NamedTuple):
    """Seconds of the slowest rank, round by round: ``Both``."""

    forward: Sequence[float]
    total: Sequence[float]

    @classmethod
    def from_rounds(cls, ranks: Sequence[Sequence[Both]], factor: float = 1.0) -> Taken:
        """Combine the rounds of all ranks; ``factor`` scales the times."""
        rounds = list(zip(*ranks, strict=True))
        return cls(*([factor * max(seconds[which] for seconds in ranks) for ranks in rounds] for which in (0, 1)))

    @property
    def medians(self) -> Both:
        """Over the rounds."""
        return Both(statistics.median(self.forward), statistics.median(self.total))


def take_turns(
    calls: Sequence[Call], rounds: int, device: torch.device, shown: Callable[[int], object] = lambda number: None
) -> list[list[Both]]:
    """Return every call's seconds on this rank, round by round; the order rotates by one each round. Collective: all
    ranks, if there are several, start a call together.

    ``shown`` is called with the number of the next call.
    """
    seconds: list[list[Both]] = [[] for _ in calls]
    for turn in range(rounds):
        first = turn % len(calls)
        for number in (*range(first, len(calls)), *range(first)):
            shown(number)
            if dist.is_initialized():
                dist.barrier()
            seconds[number].append(timed(calls[number], device))
    return seconds


def timed(call: Call, device: torch.device) -> Both:
    """Time one call on this rank, to the end of its work on the device."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize()
    marks: list[Any] = []

    def mark() -> None:
        marks.append(torch.cuda.Event(enable_timing=True) if on_cuda else time.perf_counter())
        if on_cuda:
            marks[-1].record()

    mark()
    call(mark)
    mark()
    if on_cuda:
        marks[-1].synchronize()
    start, *later = marks
    passed = [start.elapsed_time(x) / 1e3 if on_cuda else x - start for x in later]
    return Both(passed[0], passed[-1])
