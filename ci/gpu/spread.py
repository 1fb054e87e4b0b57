"""Groups of cases in processes of their own: all cores compile kernels, and a lost device affects one process only."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from record import OUT_OF_TIME, Row, Step, in_a_line

MOST = 12
"""Processes sharing a GPU."""


def check_each[C](
    step: Step, run: Callable[[C], list[Row]], groups: Sequence[C], named: Callable[[C], tuple[str, str]]
) -> None:
    """Run all groups and record what is found; ``named``: group and name under which a stopped group is recorded."""
    for group, rows in spread(run, groups, here=step.smoke, seconds=step.left):
        if isinstance(rows, str):
            step.stopped(*named(group), rows)
        else:
            for row in rows:
                step.add(*row)


def spread[C](
    run: Callable[[C], list[Row]], groups: Sequence[C], *, here: bool, seconds: float
) -> Iterator[tuple[C, list[Row] | str]]:
    """Yield every group with its rows, or with what stopped it, as they end.

    Args:
        run: a module-level function.
        here: run everything in this process.
        seconds: time for all groups; what is still running then is killed.
    """
    if here:
        for group in groups:
            yield group, run(group)
        return
    context, waiting = multiprocessing.get_context("spawn"), list(groups)
    running: dict[Connection, tuple[multiprocessing.process.BaseProcess, C]] = {}
    deadline = time.monotonic() + seconds
    while waiting or running:
        while waiting and len(running) < max(1, min(MOST, (os.cpu_count() or 1) * 3 // 4)):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_in_process, args=(run, waiting[0], writer), daemon=True)
            process.start()
            writer.close()  # only the process has the other end, so the pipe ends with it
            running[reader] = process, waiting.pop(0)
        for reader in wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
            process, group = running.pop(reader)
            try:
                rows = reader.recv()
                process.join()
            except EOFError:
                process.join()
                rows = f"its process ended with status {process.exitcode}"
            yield group, rows
        if time.monotonic() > deadline:
            for process, _ in running.values():
                process.kill()
            for group in [*(group for _, group in running.values()), *waiting]:
                yield group, OUT_OF_TIME
            return


def _in_process[C](run: Callable[[C], list[Row]], group: C, writer: Connection) -> None:
    try:
        writer.send(run(group))
    except BaseException as error:
        writer.send(in_a_line(error))
