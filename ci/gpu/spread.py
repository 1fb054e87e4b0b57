"""Many cases over processes of their own: all cores compile kernels, and a broken device stays in one process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

from record import OUT_OF_TIME, Row, Step, in_a_line

MOST = 12
"""Processes that share a GPU."""


def check_each[C](
    step: Step, run: Callable[[C], list[Row]], groups: Sequence[C], named: Callable[[C], tuple[str, str]]
) -> None:
    """Spread groups of cases, and add what is found to the step.

    Args:
        named: the group and the name under which a whole group of cases that was stopped is listed.
    """
    for group, rows in spread(run, groups, here=step.smoke, seconds=step.left):
        if isinstance(rows, str):
            step.stopped(*named(group), rows)
        else:
            for row in rows:
                step.add(*row)


def spread[C](
    run: Callable[[C], list[Row]], groups: Sequence[C], *, here: bool, seconds: float
) -> Iterator[tuple[C, list[Row] | str]]:
    """Run every group of cases; each comes with its rows, or with what stopped it, in the order in which they end.

    Args:
        run: a function of a module, as it is called in other processes.
        here: all in this process.
        seconds: for all; what has not ended then is stopped.
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
            writer.close()  # the process has the other end; the pipe ends when it does
            running[reader] = process, waiting.pop(0)
        for reader in wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
            process, group = running.pop(reader)
            yield group, _received(reader, process)
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


def _received(reader: Connection, process: multiprocessing.process.BaseProcess) -> list[Row] | str:
    try:
        found = reader.recv()
    except EOFError:
        process.join()
        found = f"its process ended with status {process.exitcode}"
    process.join()
    return found
