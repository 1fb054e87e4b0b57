"""Work done side by side in forked processes, each of which imports nothing anew."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import trial


def side_by_side(work: Sequence[tuple[Callable[..., Any], Any]], lanes: int) -> Iterator[tuple[int, Any]]:
    """(place in ``work``, function(argument)) for each pair of function and argument, as they come.

    A trial names what it leaves running, and kills it: each lane sees only what it started itself.
    """
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(lanes, mp_context=forking, initializer=_be_a_lane, initargs=(os.getpid(),)) as pool:
        places = {pool.submit(function, argument): i for i, (function, argument) in enumerate(work)}
        for done in as_completed(places):
            yield places[done], done.result()


def _be_a_lane(parent: int) -> None:
    from cp_plugin.testing.launch_rank import die_with_parent

    die_with_parent(parent)
    trial.adopt_orphans()
