"""Groups of cases in processes of their own: all cores compile kernels, and a lost device affects one process only."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from record import OUT_OF_TIME, Found, NotRun, Row, Step, lost, stopped

MOST = 16
"""Processes sharing a GPU."""


def check_each[C](
    step: Step, run: Callable[[C], Iterator[Row]], groups: Sequence[C], named: Callable[[C], tuple[str, str]]
) -> None:
    """Run all groups, in this order, and record what is found.

    Args:
        named: group and name under which is recorded what ended a group of cases early.
    """
    for group, found in spread(run, groups, here=step.smoke, seconds=step.left):
        step.add(*(found if len(found) == 4 else (*named(group), *found)))


def spread[C](
    run: Callable[[C], Iterator[Row]], groups: Sequence[C], *, here: bool, seconds: float
) -> Iterator[tuple[C, Row | Found]]:
    """Yield every group with each row of it, as they come, and with what ended it early.

    Args:
        run: a module-level function that yields what it finds of a group, case by case.
        here: run everything in this process.
        seconds: time for all groups; what is still running then is killed.
    """
    deadline = time.monotonic() + seconds
    late: Found = (None, {"reason": OUT_OF_TIME})
    if here:
        for group in groups:
            rows = run(group)
            while (row := late if time.monotonic() > deadline else next(rows, None)) is not None:
                yield group, row
                if row is late:
                    break
        return
    context, waiting = multiprocessing.get_context("spawn"), list(groups)
    running: dict[Connection, tuple[multiprocessing.process.BaseProcess, C]] = {}
    while waiting or running:
        while waiting and len(running) < min(MOST, os.cpu_count() or 1):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_in_process, args=(run, waiting[0], writer), daemon=True)
            process.start()
            writer.close()  # only the process has the other end, so the pipe ends with it
            running[reader] = process, waiting.pop(0)
        for reader in wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
            process, group = running[reader]
            try:
                row = reader.recv()
            except EOFError:
                process.join()
                row = (False, {"failure": f"its process ended with status {process.exitcode}"})
            if row is not None:
                yield group, row
            if row is None or len(row) == 2:
                del running[reader]
        if time.monotonic() > deadline:
            for process, _ in running.values():
                process.kill()
            yield from ((group, late) for group in [*(group for _, group in running.values()), *waiting])
            return


def _in_process[C](run: Callable[[C], Iterator[Row]], group: C, writer: Connection) -> None:
    """Send every row, then None, or what ended the group: none of it is tried after an error of the device."""
    try:
        for row in run(group):
            writer.send(row)
            if lost(row[3]):
                raise NotRun(f"the device was lost in {row[1]}")
        writer.send(None)
    except BaseException as error:
        writer.send(stopped(error))
