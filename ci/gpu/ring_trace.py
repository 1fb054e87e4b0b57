"""The host in a step of a ring, and what overlaps with NCCL's kernels, by torch's profiler.

Alone: one rank of eight whose peers send zeros, with few tokens: launches, and the host's time without waiting.
Over NCCL, with a GPU per rank: the share of its kernels' time in which others run. Traces are kept beside the page.
"""

from __future__ import annotations

import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import attend, lacking, of_timed, provider, rank_of
from over_ranks import device, one_over_ranks
from record import Row, Step, in_a_line
from spread import spread
from torch.profiler import ProfilerActivity, profile

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.attention.setups import Setup, settled
from cp_plugin.methods import registry as providers

FEW = Problem(size=8, seq_length=4096, heads=16, kv_heads=4)
MANY = Problem(size=4, seq_length=65536, heads=16, kv_heads=4)
TINY = Problem(size=4, seq_length=32, heads=2, head_dim=16, dtype=torch.float32)
LAUNCHES = ("LaunchKernel", "MemcpyAsync", "MemsetAsync")
"""Parts of the names of launching functions of CUDA's runtime and driver."""
ROUNDS = 10
OVERLAP_S = 20.0
"""Seconds for all ranks to start and to be traced."""


def main() -> None:
    with Step("ring_trace") as step:
        traces = str(step.folder / "traces.tar")
        for _, found in spread(alone, [traces], here=step.smoke, seconds=step.left):  # ranks are forked after it
            ok, detail = found[-2:]
            group, name = found[:2] if len(found) == 4 else ("trace", "the rest")
            if ok:
                step.figure(group, name, **detail)
            else:
                step.not_run(f"{group}: {name}", " ".join(map(str, detail.values())))
        over_nccl(step)


def alone(traces: str) -> Iterator[Row]:
    """Figures of every kernel, in a process of its own; those whose plans take long to build come last."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    smoke = device.type == "cpu"
    problem = TINY if smoke else FEW
    for backend in ("auto",) if smoke else ("triton", "sdpa", "auto", "cudnn"):
        for name in ("ring",) if smoke else ("ring", "striped"):
            if reason := lacking(backend, device, problem):
                yield "trace", f"{name}, backend {backend}", None, {"reason": reason}
                continue
            setup = settled(providers.get(name), problem, Options(backend=backend))
            try:
                yield from of_one(setup, device, traces)
            except Exception as error:  # of any library
                yield "trace", f"{name}, backend {backend}", None, {"reason": in_a_line(error)}


def of_one(setup: Setup, device: torch.device, traces: str) -> Iterator[Row]:
    """Launches and microseconds of a ring step, forward and backward."""
    rank, size, name = rank_of(setup, device), setup.problem.size, setup.provider.name
    backend, of = setup.options.backend, of_timed(setup, device)
    _, lse = rank.forward()
    delta = torch.zeros_like(lse)
    for phase, call in (("forward", rank.forward), ("backward", lambda: rank.backward(lse, delta))):
        call()
        found = traced(call, traces if backend == "auto" else "", f"{name}-{phase}.trace.json.gz")
        launches = sum(any(kind in event.name for kind in LAUNCHES) for event in found)
        on_cpu = device.type == "cpu"
        microseconds = statistics.median(host_us(call) for _ in range(1 if on_cpu else ROUNDS)) / size
        what = f"{name}, backend {backend}, {phase}, {setup.problem.seq_length // size} tokens a rank"
        if on_cpu:
            reason = "there are launches on CUDA devices only"
            yield "launches of a ring step", what, None, {"reason": reason}
        else:
            yield "launches of a ring step", what, True, {"value": launches / size, "of": of}
        yield "microseconds of the host in a ring step", what, True, {"value": microseconds, "of": of}


def traced(call: Callable[[], object], traces: str = "", name: str = "") -> list[Any]:
    """The profiler's events of a call including its work on the device; ``traces``: an archive that keeps them."""
    on_cuda = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=kinds) as profiler:
        call()
        if on_cuda:
            torch.cuda.synchronize()
    if traces:
        with tempfile.TemporaryDirectory() as folder, tarfile.open(traces, "a") as archive:
            profiler.export_chrome_trace(str(file := Path(folder, name)))
            archive.add(file, name)
    return list(profiler.events())


def host_us(call: Callable[[], object]) -> float:
    """Microseconds until a call returns, on an idle device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def over_nccl(step: Step) -> None:
    """Overlap on the ranks of ``MANY``; on a shared GPU it would be time slicing."""
    problem = TINY if step.smoke else MANY
    title = f"share of {step.library}'s time in which other kernels run"
    if 0 < step.devices < problem.size:
        step.not_run(title, f"{problem.size} ranks share {step.devices} GPU")
        return
    for connections in ("1",) if step.smoke else ("1", "8"):
        name = f"ring, {problem.seq_length} tokens on {problem.size} ranks, CUDA_DEVICE_MAX_CONNECTIONS={connections}"
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        told = one_over_ranks(step, partial(overlap, problem), ranks=problem.size, case_s=OVERLAP_S, env=env)
        if isinstance(told, tuple):
            step.not_run(f"{title}: {name}", " ".join(map(str, told[1].values())))
            continue
        together, messages = (sum(one) for one in zip(*told, strict=True))
        if messages:
            ms, of = messages / 1e3 / len(told), (provider("ring"),)
            step.figure(title, name, together / messages, of=of, **{"ms of messages": ms})
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
