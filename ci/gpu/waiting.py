"""With a GPU per rank: the share of a call that waits for messages, not hidden behind computation.

It is the time over NCCL minus that of the same rank alone, whose messages take none. The smoke test uses Gloo.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cases import attend, provider, rank_of
from over_ranks import device, over_ranks
from record import Call, Found, Step

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.attention.setups import settled
from cp_plugin.methods import registry as providers

MOST = 8
TIMED = Problem(size=MOST, seq_length=65536, heads=16, kv_heads=8)
TINY = Problem(size=2, seq_length=32, heads=2, kv_heads=2, head_dim=16, dtype=torch.float32)
ROUNDS = 5


def main() -> None:
    with Step("waiting") as step:
        title = f"share of the time that {step.library} is waited for"
        if step.devices < 2 and not step.smoke:
            step.not_run(title, "there is one GPU, which the ranks would share")
            return
        names = ["ring", "all_gather"] if step.smoke else providers.names()
        size = min(MOST, 1 << (step.devices.bit_length() - 1)) if step.devices else TINY.size
        problem = replace(TINY if step.smoke else TIMED, size=size)

        def done(number: int, found: list[Any] | Found) -> None:
            name = f"{names[number]}, {problem.seq_length} tokens, {size} ranks"
            if isinstance(found, tuple):
                step.not_run(f"{title}: {name}", " ".join(map(str, found[1].values())))
                return
            (ms, alone), of = found[0], (provider(names[number]),)
            step.figure(title, name, 1 - alone / ms, of=of, **{"ms": ms, "computation ms": alone})

        over_ranks(step, lambda number: times(names[number], problem), len(names), done, ranks=size)


def times(name: str, problem: Problem) -> tuple[float, float]:
    """Milliseconds of forward and backward over the group, and of this rank alone."""
    cp = ContextParallel(name, group=dist.new_group(range(problem.size)), problem=problem)
    alone = rank_of(settled(providers.get(name), problem, Options()), device(), index=dist.get_rank())
    return median(lambda: attend(cp, alone.x, problem)), median(alone)


def median(call: Call) -> float:
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    found = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found[1:])


if __name__ == "__main__":
    main()
