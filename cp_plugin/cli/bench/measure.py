"""The test case that every contestant must pass, and the timing of calls that take turns.

Everything is collective over all ranks. Times come from CUDA events, or from the clock on the CPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.cli.bench.cases import Case
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import oracle

TOKENS = 32
"""Of a rank, in the test case."""
Call = Callable[[Callable[[], object]], object]
"""A forward and a backward; its argument is called in between."""


def question(case: Case, kind: Kind, tokens: int = TOKENS) -> oracle.Case:
    """A short sequence of the same kind with the expected results, deterministic; ``tokens``: of a rank."""
    short = case.small(tokens * case.problem.size)
    return oracle.make_case(short.problem, kind, short.bounds)


def errors(got: Iterable[Tensor], want: Iterable[Tensor]) -> list[float]:
    """Relative errors (norm) of sharded tensors; infinite if a shard is not finite or has the wrong shape."""
    squares = []
    for mine, wanted in zip(got, (x.double() for x in want), strict=True):
        error = (mine.cpu().double() - wanted).square().sum().item() if mine.shape == wanted.shape else torch.inf
        squares.append((error, wanted.square().sum().item()))
    of_ranks = torch.tensor(everywhere(squares), dtype=torch.float64)
    error, norm = of_ranks.sum(0).unbind(1)
    return (error / norm).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()


def everywhere[T](mine: T) -> list[T]:
    """All-gather a value."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


class Both(NamedTuple):
    """Seconds, or a quantity derived from them."""

    forward: float
    total: float
    """Forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Seconds of the slowest rank, round by round."""

    forward: Sequence[float]
    total: Sequence[float]
    """Forward and backward."""

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Both]], factor: float = 1.0) -> Taken:
        """From the rounds of all ranks; ``factor`` scales the times."""
        rounds = list(zip(*ranks, strict=True))
        return cls(
            forward=[factor * max(s.forward for s in of_ranks) for of_ranks in rounds],
            total=[factor * max(s.total for s in of_ranks) for of_ranks in rounds],
        )

    @property
    def medians(self) -> Both:
        """Over the rounds."""
        return Both(statistics.median(self.forward), statistics.median(self.total))


def take_turns(
    calls: Sequence[Call], rounds: int, device: torch.device, shown: Callable[[int], object] = lambda number: None
) -> list[list[Both]]:
    """Every call's seconds on this rank, round by round; the order rotates by one each round.

    ``shown`` is called with the number of the next call.
    """
    found: list[list[Both]] = [[] for _ in calls]
    for turn in range(rounds):
        first = turn % len(calls)
        for number in (*range(first, len(calls)), *range(first)):
            shown(number)
            found[number].append(once(calls[number], device))
    return found


def once(call: Call, device: torch.device) -> Both:
    """Time one call; all ranks start together."""
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


class Processors:
    """Processor time of other programs: that of all since construction, less this process and its finished children."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), _busy(), _own()

    def others(self) -> float:
        """The share of processor time that other programs used."""
        whole = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return max(0.0, (_busy() - self._busy) - (_own() - self._own)) / whole


def _busy() -> float:
    """Seconds of all programs, without interrupts, which carry our packets."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def _own() -> float:
    return sum(os.times()[:4])  # user and system time of this process and of its children
