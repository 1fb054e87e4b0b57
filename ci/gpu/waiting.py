"""With a GPU per rank: the share of a call that waits for messages, and what runs beside NCCL's kernels in a ring.

Waiting is the time over NCCL minus that of the same rank alone, whose messages take none. Where ranks share a GPU, both
would be time slicing. The smoke test uses Gloo.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from cases import attend, provider, rank_of
from over_ranks import device, one_over_ranks, over_ranks
from record import Call, Found, Step
from ring_trace import traced

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.clock import take_turns

MOST = 8
TIMED = Problem(size=MOST, seq_length=65536, heads=16, kv_heads=8)
TINY = Problem(size=2, seq_length=32, heads=2, kv_heads=2, head_dim=16, dtype=torch.float32)
ROUNDS = 5


def main() -> None:
    with Step("waiting") as step:
        title = f"share of the time that {step.library} is waited for"
        beside = f"share of {step.library}'s time in which other kernels run"
        if step.devices < 2 and not step.smoke:
            for name in (title, beside):
                step.not_run(name, "ranks share a GPU: there is one")
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
        overlaps(step, beside, problem)


def times(name: str, problem: Problem) -> tuple[float, float]:
    """Milliseconds of forward and backward over the group, and of this rank alone."""
    cp = ContextParallel(name, group=dist.new_group(range(problem.size)), problem=problem)
    alone = rank_of(settled(providers.get(name), problem, Options()), device(), index=dist.get_rank())
    return median(lambda: attend(cp, alone.x, problem)), median(alone)


def median(call: Call) -> float:
    """Milliseconds of a call that all ranks begin together; the first one warms up."""
    ((_, *taken),) = take_turns([lambda mark: call()], ROUNDS + 1, device())
    return 1e3 * statistics.median(one.total for one in taken)


def overlaps(step: Step, title: str, problem: Problem) -> None:
    """Overlap in a ring."""
    for connections in ("1",) if step.smoke else ("1", "8"):
        name = f"ring, {problem.seq_length} tokens on {problem.size} ranks, CUDA_DEVICE_MAX_CONNECTIONS={connections}"
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        told = one_over_ranks(step, partial(overlap, problem), ranks=problem.size, env=env)
        if isinstance(told, tuple):
            step.not_run(f"{title}: {name}", " ".join(map(str, told[1].values())))
            continue
        together, messages = (sum(one) for one in zip(*told, strict=True))
        if messages:
            detail = {"ms of messages": messages / 1e3 / len(told)}
            step.figure(title, name, together / messages, of=(provider("ring"),), **detail)
        else:
            step.not_run(f"{title}: {name}", "the profiler sees no kernels of it here")


def overlap(problem: Problem) -> tuple[float, float]:
    """Microseconds in which NCCL's kernels overlap with others, and in which they run."""
    cp = ContextParallel("ring", group=dist.new_group(range(problem.size)), problem=problem)
    x = rank_of(settled(providers.get("ring"), problem, Options()), device(), index=dist.get_rank()).x
    attend(cp, x, problem)
    kernels = [e for e in traced(lambda: attend(cp, x, problem)) if e.device_type == torch.autograd.DeviceType.CUDA]
    ends = [("nccl" in e.name.lower(), e.time_range.start, e.time_range.end) for e in kernels]
    messages = joined((start, end) for of_nccl, start, end in ends if of_nccl)
    others = joined((start, end) for of_nccl, start, end in ends if not of_nccl)
    together = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in messages for b in others)
    return together, sum(end - start for start, end in messages)


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time spans."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


if __name__ == "__main__":
    main()
