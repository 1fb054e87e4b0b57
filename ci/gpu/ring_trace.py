"""The host in a step of a ring, by torch's profiler: launches, and its time without waiting.

One rank of eight runs alone, with few tokens; its peers send zeros. Traces are kept beside the page.
"""

from __future__ import annotations

import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import lacking, of_timed, rank_of
from record import Step
from torch.profiler import ProfilerActivity, profile

from cp_plugin import Options, Problem
from cp_plugin.engine.attention.calls import Setup, settled
from cp_plugin.engine.methods import registry as providers

FEW = Problem(size=8, seq_length=4096, heads=16, kv_heads=4)
TINY = Problem(size=4, seq_length=32, heads=2, head_dim=16, dtype=torch.float32)
LAUNCHES = ("LaunchKernel", "MemcpyAsync", "MemsetAsync")
"""Parts of the names of launching functions of CUDA's runtime and driver."""
ROUNDS = 10


def main() -> None:
    with Step("ring_trace") as step:
        problem = TINY if step.smoke else FEW
        for backend in ("auto",) if step.smoke else ("triton", "sdpa", "auto", "cudnn"):
            for provider in ("ring",) if step.smoke else ("ring", "striped"):
                name = f"{provider}, backend {backend}"
                if reason := lacking(backend, step.device, problem):
                    step.not_run(f"trace of {name}", reason)
                    continue
                setup = settled(providers.get(provider), problem, Options(backend=backend))
                step.measure(f"trace of {name}", partial(alone, step, setup, name))


def alone(step: Step, setup: Setup, name: str) -> None:
    """Launches and microseconds of a ring step, forward and backward."""
    rank, size, backend = rank_of(setup, step.device), setup.problem.size, setup.options.backend
    _, lse = rank.forward()
    delta = torch.zeros_like(lse)
    for phase, call in (("forward", rank.forward), ("backward", lambda: rank.backward(lse, delta))):
        call()
        kept = step.folder / "traces.tar" if backend == "auto" else None
        found = traced(call, kept, f"{setup.provider.name}-{phase}.trace.json.gz")
        launches = sum(any(kind in event.name for kind in LAUNCHES) for event in found)
        microseconds = statistics.median(host_us(call) for _ in range(1 if step.smoke else ROUNDS)) / size
        what = f"{name}, {phase}, {setup.problem.seq_length // size} tokens a rank"
        if step.smoke:
            step.not_run(f"launches of a ring step: {what}", "there are launches on CUDA devices only")
        else:
            step.figure("launches of a ring step", what, launches / size, of=of_timed(setup, step.device))
        step.figure("microseconds of the host in a ring step", what, microseconds, of=of_timed(setup, step.device))


def traced(call: Callable[[], object], kept: Path | None = None, name: str = "") -> list[Any]:
    """The profiler's events of a call including its work on the device; the archive ``kept`` gets the trace."""
    on_cuda = torch.cuda.is_available()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=kinds) as profiler:
        call()
        if on_cuda:
            torch.cuda.synchronize()
    if kept is not None:
        with tempfile.TemporaryDirectory() as folder, tarfile.open(kept, "a") as archive:
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


if __name__ == "__main__":
    main()
