"""Worker processes that live and die with their parent, and say how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cp_plugin.megatron.dataset.work import Job, Stopped
from cp_plugin.testing.launch_rank import die_with_parent

_OFTEN = 0.1
"""Seconds between two reports of progress."""

type Task = Callable[[Job, int, Callable[[int, int, int], None]], Any]

_here: _Worker | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """What a worker process has."""

    job: Job
    counters: Any
    """Three numbers of every worker."""
    stop: Any
    first: int
    """Where its own three are."""


class Pool:
    """Runs ``work.check`` or ``work.tokenize`` on shards."""

    def __init__(self, job: Job, workers: int) -> None:
        context = multiprocessing.get_context("fork")  # so that all share one tokenizer
        self._counters = context.RawArray("q", 3 * workers)  # no lock: a worker that is killed would keep it
        self._stop = context.RawValue("b", 0)
        shared = (self._counters, self._stop, context.Value("i", 0))
        self._executor = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), job, *shared))

    def run(self, task: Task, shards: Iterable[int], progress: Callable[[int, int, int], None]) -> Iterator[Any]:
        """Do it for these shards; what each gives, with its number, in the order in which they end.

        progress: called often with bytes read, tokens written and files finished.

        Raises:
            RuntimeError: if a worker was killed. And what the task raises.
        """
        self._counters[:] = [0] * len(self._counters)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking: torch has threads, all of them idle
                waiting: dict[Future[Any], int] = {self._executor.submit(_do, task, n): n for n in shards}
            while waiting:
                done, _ = wait(waiting, timeout=_OFTEN, return_when=FIRST_COMPLETED)
                progress(*(sum(self._counters[i::3]) for i in range(3)))
                for future in done:
                    yield waiting.pop(future), future.result()
        except BrokenProcessPool:
            time.sleep(_OFTEN)  # a scheduler's SIGTERM ends all processes: this one's own is the better report
            raise RuntimeError(
                "a worker process was killed, most likely because memory ran out: take fewer --workers; what is done "
                "is kept, and the same command continues"
            ) from None

    def close(self) -> None:
        """Stop at the next document, and wait for it."""
        self._stop.value = 1
        self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def pool(job: Job, workers: int) -> Iterator[Pool]:
    """Worker processes, which end with this context."""
    opened = Pool(job, workers)
    try:
        yield opened
    finally:
        opened.close()


def _begin(parent: int, job: Job, counters: Any, stop: Any, begun: Any) -> None:
    """Be a worker. A terminal's Ctrl-C reaches all processes, and the parent is to answer it."""
    global _here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool ends its workers by it, too
    die_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with begun.get_lock():
        number, begun.value = begun.value, begun.value + 1
    _here = _Worker(job=job, counters=counters, stop=stop, first=3 * number)


def _do(task: Task, shard: int) -> Any:
    assert _here is not None
    return task(_here.job, shard, _count)


def _count(*more: int) -> None:
    assert _here is not None
    for i, n in enumerate(more):
        _here.counters[_here.first + i] += n
    if _here.stop.value:
        raise Stopped
