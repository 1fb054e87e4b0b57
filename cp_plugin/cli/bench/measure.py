"""The test case that every contestant must pass (collective over all ranks), and what other programs take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil
import torch
from torch import Tensor

from cp_plugin.cli.bench.cases import Case
from cp_plugin.comm.every_rank import gather_objects
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import oracle

TOKENS = 32  # of a rank, in the test case


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
    of_ranks = torch.tensor(gather_objects(squares), dtype=torch.float64)
    error, norm = of_ranks.sum(0).unbind(1)
    return (error / norm).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()


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
