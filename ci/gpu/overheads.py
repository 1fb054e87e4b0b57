"""What a call costs beside its kernels: waits of the host, memory, launches, and waiting for messages.

hot_path      the host never waits for the device, and peak memory is that of the same method on tensors without data
              and kernels without workspace (``cp_plugin.planner.trace.memory``)
ring_trace    the host in a step of a ring, by torch's profiler: launches, and its time without waiting
waiting       with a GPU per rank: the share of a call that waits for messages, and what runs beside NCCL's kernels

In the first two one rank of eight runs alone, forward and backward; its peers send zeros.
"""

from __future__ import annotations

import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Alone, attend, cannot, lacking, masked, provider, rank_of, timed_parts
from record import Call, Step, Verdict, one_line
from torch.profiler import ProfilerActivity, profile
from workers import device, once_on_ranks, run_on_ranks

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.engine.attention.calls import Setup, settled, settled_or_reason
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.trace.memory import Meter, Peaks, peaks
from cp_plugin.testing.clock import take_turns

LARGE = Problem(size=8, seq_length=65536, heads=16, kv_heads=4)
TINY = Problem(size=4, seq_length=64, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
AT_MOST = 1.05
"""Target of measured over predicted memory, with our kernels."""
FEW = replace(LARGE, seq_length=4096)
"""So few tokens that the device waits for the host."""
LAUNCHES = ("LaunchKernel", "MemcpyAsync", "MemsetAsync")
"""Parts of the names of launching functions of CUDA's runtime and driver."""
HOST_ROUNDS = 10
MOST = 8
TIMED = replace(LARGE, kv_heads=8)
TINY_TIMED = replace(TINY, size=2, seq_length=32, heads=2)
ROUNDS = 5


def hot_path(step: Step) -> None:
    problem = TINY if step.smoke else LARGE
    if step.smoke:
        step.not_run("whether the host waits", "torch can tell on CUDA devices only")
    backends = ("sdpa",) if step.smoke else ("triton", "sdpa", "auto")
    for mask, backend in product(("causal",) if step.smoke else ("causal", "documents"), backends):
        if reason := lacking(backend, step.device, problem):
            step.not_run(f"hot path with backend {backend}, {mask}", reason)
            continue
        call, documents = masked(problem, mask)
        for name in providers.names():
            setup = settled_or_reason(providers.get(name), call, Options(backend=backend))
            what = f"{name}, {mask}, backend {backend}"
            if reason := cannot(setup, step.device):
                step.not_run(f"hot path of {what}", reason)
            else:
                step.attempt("the host never waits", what, partial(look, step, what, setup, documents))


def look(step: Step, name: str, setup: Setup, documents: tuple[int, ...]) -> Verdict:
    """Both checks of one provider: that the host never waits, and of one document, which is predicted, memory."""
    rank = rank_of(setup, step.device, documents)
    rank()  # compiles kernels, and fills the caches of positions
    failure = "" if step.smoke else find_wait(rank)
    if not documents:
        measure_memory(step, name, setup, rank)
    return not failure, {"failure": failure} if failure else {}


def measure_memory(step: Step, name: str, setup: Setup, rank: Alone) -> None:
    """Peak memory over the prediction."""
    wanted = ("<=", AT_MOST) if setup.options.backend == "triton" else None
    inputs = show_bytes(sum(x.nbytes for x in rank.x[:4]))
    predicted = peaks(setup.provider, setup.problem, setup.options, index=1)
    forward, (_, lse) = measure_peak(rank.forward)
    delta = torch.zeros_like(lse)
    backward, _ = measure_peak(lambda: rank.backward(lse, delta))
    for phase, measured, bytes_ in zip(Peaks._fields, (forward, backward), predicted, strict=True):
        detail = {"measured": show_bytes(measured), "predicted": show_bytes(bytes_), "inputs": inputs}
        title, what = "peak memory over the prediction", f"{name}, {phase}"
        step.figure(title, what, measured / bytes_, wanted, timed_parts(setup, step.device), **detail)


def find_wait(rank: Alone) -> str:
    """What made the host wait for the device, or ""."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rank()
    except RuntimeError as error:
        return one_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return ""


def measure_peak[T](run: Callable[[], T]) -> tuple[int, T]:
    """Peak bytes of a call beside what was allocated before, and its result; counted by the meter on the CPU."""
    if not torch.cuda.is_available():
        with Meter() as meter:
            result = run()
        return meter.peak, result
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def ring_trace(step: Step) -> None:
    """Traces of ``auto`` are kept beside the page."""
    problem = replace(TINY, seq_length=32, heads=2, kv_heads=1) if step.smoke else FEW
    for backend in ("auto",) if step.smoke else ("triton", "sdpa", "auto", "cudnn"):
        for name in ("ring",) if step.smoke else ("ring", "striped"):
            what = f"{name}, backend {backend}"
            if reason := lacking(backend, step.device, problem):
                step.not_run(f"trace of {what}", reason)
            else:
                setup = settled(providers.get(name), problem, Options(backend=backend))
                step.measure(f"trace of {what}", partial(measure_host, step, setup, what))


def measure_host(step: Step, setup: Setup, name: str) -> None:
    """Launches and microseconds of a ring step, forward and backward."""
    rank, size, parts = rank_of(setup, step.device), setup.problem.size, timed_parts(setup, step.device)
    _, lse = rank.forward()
    delta = torch.zeros_like(lse)
    for phase, call in (("forward", rank.forward), ("backward", lambda: rank.backward(lse, delta))):
        call()
        archive = step.folder / "traces.tar" if setup.options.backend == "auto" else None
        events = trace(call, archive, f"{setup.provider.name}-{phase}.trace.json.gz")
        launches = sum(any(kind in event.name for kind in LAUNCHES) for event in events)
        microseconds = statistics.median(host_us(call) for _ in range(1 if step.smoke else HOST_ROUNDS)) / size
        what = f"{name}, {phase}, {setup.problem.seq_length // size} tokens a rank"
        if step.smoke:
            step.not_run(f"launches of a ring step: {what}", "there are launches on CUDA devices only")
        else:
            step.figure("launches of a ring step", what, launches / size, of=parts)
        step.figure("microseconds of the host in a ring step", what, microseconds, of=parts)


def trace(call: Call, archive: Path | None = None, name: str = "") -> list[Any]:
    """The profiler's events of a call including its work on the device; the archive, if any, gets the trace."""
    on_cuda = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=kinds) as profiler:
        call()
        if on_cuda:
            torch.cuda.synchronize()
    if archive is not None:
        with tempfile.TemporaryDirectory() as folder, tarfile.open(archive, "a") as traces:
            profiler.export_chrome_trace(str(file := Path(folder, name)))
            traces.add(file, name)
    return list(profiler.events())


def host_us(call: Call) -> float:
    """Microseconds until a call returns, on an idle device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def waiting(step: Step) -> None:
    """Waiting is the time over NCCL minus that of the same rank alone, whose messages take none. Where ranks share a
    GPU, both would be time slicing. The smoke test uses Gloo."""
    title = f"share of the time that {step.library} is waited for"
    beside = f"share of {step.library}'s time in which other kernels run"
    if step.devices < 2 and not step.smoke:
        for name in (title, beside):
            step.not_run(name, "ranks share a GPU: there is one")
        return
    names = ["ring", "all_gather"] if step.smoke else providers.names()
    size = min(MOST, 1 << (step.devices.bit_length() - 1)) if step.devices else TINY_TIMED.size
    problem = replace(TINY_TIMED if step.smoke else TIMED, size=size)
    for number, times in run_on_ranks(step, lambda number: time_both(names[number], problem), len(names), ranks=size):
        name = f"{names[number]}, {problem.seq_length} tokens, {size} ranks"
        if isinstance(times, tuple):
            step.not_run(f"{title}: {name}", " ".join(map(str, times[1].values())))
        else:
            ms, alone = times[0]
            detail = {"ms": ms, "computation ms": alone}
            step.figure(title, name, 1 - alone / ms, of=(provider(names[number]),), **detail)
    measure_overlap(step, beside, problem)


def time_both(name: str, problem: Problem) -> tuple[float, float]:
    """Milliseconds of forward and backward over the group, and of this rank alone."""
    cp, alone = group_and_alone(name, problem)
    return median_ms(lambda: attend(cp, alone.x, problem)), median_ms(alone)


def group_and_alone(name: str, problem: Problem) -> tuple[ContextParallel, Alone]:
    """A provider over a new group of all ranks, and this rank alone."""
    alone = rank_of(settled(providers.get(name), problem, Options()), device(), index=dist.get_rank())
    return ContextParallel(name, group=dist.new_group(range(problem.size)), problem=problem), alone


def median_ms(call: Call) -> float:
    """Milliseconds of a call that all ranks begin together; the first one warms up."""
    ((_, *taken),) = take_turns([lambda mark: call()], ROUNDS + 1, device())
    return 1e3 * statistics.median(one.total for one in taken)


def measure_overlap(step: Step, title: str, problem: Problem) -> None:
    """Overlap in a ring."""
    for connections in ("1",) if step.smoke else ("1", "8"):
        name = f"ring, {problem.seq_length} tokens on {problem.size} ranks, CUDA_DEVICE_MAX_CONNECTIONS={connections}"
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
        spans = once_on_ranks(step, partial(overlap, problem), ranks=problem.size, env=env)
        if isinstance(spans, tuple):
            step.not_run(f"{title}: {name}", " ".join(map(str, spans[1].values())))
            continue
        together, messages = (sum(one) for one in zip(*spans, strict=True))
        if messages:
            detail = {"ms of messages": messages / 1e3 / len(spans)}
            step.figure(title, name, together / messages, of=(provider("ring"),), **detail)
        else:
            step.not_run(f"{title}: {name}", "the profiler sees no kernels of it here")


def overlap(problem: Problem) -> tuple[float, float]:
    """Microseconds in which NCCL's kernels overlap with others, and in which they run."""
    cp, alone = group_and_alone("ring", problem)
    attend(cp, alone.x, problem)
    events = trace(lambda: attend(cp, alone.x, problem))
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [("nccl" in e.name.lower(), (e.time_range.start, e.time_range.end)) for e in kernels]
    messages = union(span for of_nccl, span in spans if of_nccl)
    others = union(span for of_nccl, span in spans if not of_nccl)
    together = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in messages for b in others)
    return together, sum(end - start for start, end in messages)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time spans."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
