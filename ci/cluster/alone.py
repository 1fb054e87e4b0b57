"""One rank of a contestant without peers: the bytes it would send, and the time of its kernel calls.

No rank waits for another or shares a processor with one: kernel times are those of a rank on a device of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from packs import OnPack

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention.calls import of_method, shapes
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.cli.bench.ideal import random_parts
from cp_plugin.comm import TraceMesh
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.kernels import blocks
from cp_plugin.kernels.blocks import Block, BlockKernel
from cp_plugin.kernels.recording import RecordingKernel

_CPU = torch.device("cpu")


def sent(entry: Entry, problem: Problem, bounds: Sequence[int] = ()) -> list[int]:
    """Bytes that each rank sends in a forward and a backward; ``bounds``: of the documents, for ``OnPack`` entries."""
    q, k, v, dout, *_ = shapes(problem, problem.seq_length // problem.size)
    found = []
    for cp in _ranks(entry, problem, bounds):
        of_method(cp.around(RecordingKernel(), problem, mask=problem.mask(tuple(bounds))), q, k, v, dout)
        found.append(cp.mesh.ledger.bytes())
    return found


def kernel_seconds(
    entries: Sequence[Entry], problem: Problem, bounds: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    """Processor time of each rank's kernel calls, forward and backward: medians over rounds taken in turn."""
    inputs = random_parts(problem, problem.seq_length // problem.size, _CPU)[:4]
    runs = []
    for entry in entries:
        for cp in _ranks(entry, problem, bounds):
            kernel = Timed(blocks.choose(cp.options, problem, _CPU).kernel)
            method = cp.around(kernel, problem, problem.head_dim**-0.5, problem.mask(tuple(bounds)))
            of_method(method, *inputs)  # builds the plans
            runs.append((str(entry), kernel, method, []))
    for _ in range(rounds):
        for _, kernel, method, seconds in runs:
            kernel.seconds.clear()
            of_method(method, *inputs)
            seconds.append(sum(kernel.seconds))
    found: dict[str, list[float]] = {}
    for name, _, _, seconds in runs:
        found.setdefault(name, []).append(statistics.median(seconds))
    return found


@dataclass(frozen=True, slots=True)
class Timed:
    """A kernel, and the processor time of each of its calls."""

    inner: BlockKernel
    seconds: list[float] = field(default_factory=list)

    def forward(
        self, queries: Queries, kv: KeyValues, block: Block, scale: float, onto: Partial | None = None
    ) -> Partial | None:
        return self._timed(self.inner.forward, queries, kv, block, scale, onto)

    def backward(
        self, queries: Queries, kv: KeyValues, block: Block, scale: float, onto: Sums = NO_SUMS
    ) -> Gradients | None:
        return self._timed(self.inner.backward, queries, kv, block, scale, onto)

    def _timed[T](self, call: Callable[..., T], *args: object) -> T:
        start = time.thread_time()
        found = call(*args)
        self.seconds.append(time.thread_time() - start)
        return found


def _ranks(entry: Entry, problem: Problem, bounds: Sequence[int]) -> Iterator[ContextParallel]:
    setup = entry.setup(problem)
    for index in range(problem.size):
        cp = ContextParallel(setup, mesh=TraceMesh(setup.axes, index))
        yield entry.placed(cp, bounds) if isinstance(entry, OnPack) else cp
