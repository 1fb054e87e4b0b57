"""Planner search time on one core, for 64 to 4,096 GPUs. Needs a quiet machine, like ``ratios.py``.

python ci/perf/search.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console

from cp_plugin.planner.asked import Asked, Fixed, fitting, of_name
from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.search import Plan, answer
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel

_TIMES = 3


def main() -> int:
    torch.set_num_threads(1)
    _fixed(8, 1, 8, 2**16)  # warm up imports
    good = True
    for text, search, limit in (
        ("64 GPUs, context 64", lambda: _fixed(64, 1, 64, 2**20), 2.0),
        ("64 GPUs, llama3-70b, every way to divide it", lambda: _open(64, 2**17), 2.0),
        ("1,024 GPUs, tensor 8, context 128", lambda: _fixed(1024, 8, 128, 2**22), 5.0),
        ("1,024 GPUs, llama3-70b, every way to divide it", lambda: _open(1024, 2**20), 5.0),
        ("1,024 GPUs, context 1,024", lambda: _fixed(1024, 1, 1024, 2**24), 20.0),
        ("4,096 GPUs, tensor 8, context 512", lambda: _fixed(4096, 8, 512, 2**24), 20.0),
        ("4,096 GPUs, llama3-70b, every way to divide it", lambda: _open(4096, 2**22), 20.0),
    ):
        found, seconds = _timed(search)
        good &= seconds <= limit
        verdict = "PASS" if seconds <= limit else "FAIL"
        Console(soft_wrap=True).print(
            f"{verdict} {text}: {seconds:.1f} s of one core (limit {limit:g} s), {found.simulated} of "
            f"{found.tried} configurations simulated: {found.best.candidate.flags}",
            highlight=False,
        )
    return not good


def _fixed(devices: int, tensor: int, context: int, tokens: int) -> Plan:
    shape = Parallel(
        devices=devices,
        tensor=tensor,
        context=context,
        seq_length=tokens,
        recompute="full",
        sequence_parallel=tensor > 1,
    )
    return answer(Asked(model=model("llama3-8b"), shapes=[shape], cluster=cluster("dgx-h100")))


def _open(devices: int, tokens: int) -> Plan:
    return answer(fitting(of_name("llama3-70b", devices, tokens, "dgx-h100", Fixed())))


def _timed(search: Callable[[], Plan]) -> tuple[Plan, float]:
    """Result and median processor time."""
    times = []
    for _ in range(_TIMES):
        start = time.process_time()
        found = search()
        times.append(time.process_time() - start)
    return found, statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
