"""With a GPU for each rank: how much of the time of a call is not hidden behind computation.

That is the time over NCCL less that of the same rank alone (``alone``), whose messages take none. The smoke test has
Gloo in the place of NCCL.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from alone import rank_of
from attend import attend
from cases import Shape, Sort, problem_of
from over_ranks import device, over_ranks
from record import Step

from cp_plugin import ContextParallel
from cp_plugin.methods import registry as providers

MOST = 8
TIMED = Shape(0, 65536, 16, 8, 128, 128, torch.bfloat16)
TINY = Shape(2, 32, 2, 2, 16, 16, torch.float32)
ROUNDS = 5


def main() -> None:
    with Step("waiting") as step:
        devices = 0 if step.smoke else torch.cuda.device_count()
        if devices < 2 and not step.smoke:
            step.not_run("time that NCCL is waited for", "there is one GPU, which its ranks would take turns on")
            return
        size = 2 if step.smoke else min(MOST, 1 << (devices.bit_length() - 1))
        names = ["ring", "all_gather"] if step.smoke else providers.names()
        shape = TINY if step.smoke else TIMED._replace(size=size)
        library = "Gloo" if step.smoke else "NCCL"

        def done(number: int, found: list[Any] | str) -> None:
            name = f"{names[number]}, {shape.tokens} tokens, {size} ranks"
            if isinstance(found, str):
                step.not_run(f"time that {library} is waited for: {name}", found)
                return
            ms, alone = found[0]
            detail = {"ms": ms, "computation ms": alone}
            step.figure(f"share of the time that {library} is waited for", name, 1 - alone / ms, None, **detail)

        over_ranks(
            lambda number: times(names[number], shape),
            len(names),
            done,
            ranks=size,
            devices=devices,
            seconds=lambda: step.left,
        )


def times(name: str, shape: Shape) -> tuple[float, float]:
    """Milliseconds of forward and backward over the group, and of this rank alone."""
    cp = ContextParallel(name, group=dist.new_group(range(shape.size)), problem=problem_of(shape, Sort()))
    alone = rank_of(name, shape, Sort(), "auto", device(), index=dist.get_rank())
    return median(lambda: attend(cp, alone.x, Sort())), median(alone)


def median(call: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found[1:])


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
