"""In the hot path the host never waits for the device, and peak memory is as predicted.

One rank of eight runs alone, forward and backward. Its peak memory beside the inputs is compared with that of the same
method on tensors without data and kernels without workspace (``cp_plugin.planner.trace.memory``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from cases import Alone, cannot, lacking, masked, of_timed, rank_of
from record import Found, Step, in_a_line

from cp_plugin import Options, Problem
from cp_plugin.engine.attention.calls import Setup, settled_or_reason
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.trace.memory import Meter, Peaks, peaks

LARGE = Problem(size=8, seq_length=65536, heads=16, kv_heads=4)
TINY = Problem(size=4, seq_length=64, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
AT_MOST = 1.05
"""Target of measured over predicted memory, with our kernels."""


def main() -> None:
    with Step("hot_path") as step:
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
                    continue
                step.attempt("the host never waits", what, partial(look, step, what, setup, documents))


def look(step: Step, name: str, setup: Setup, documents: tuple[int, ...]) -> Found:
    """Both checks of one provider: that the host never waits, and of one document, which is predicted, memory."""
    rank = rank_of(setup, step.device, documents)
    rank()  # compiles kernels, and fills the caches of positions
    failure = "" if step.smoke else waits(rank)
    if not documents:
        memory(step, name, setup, rank)
    return not failure, {"failure": failure} if failure else {}


def memory(step: Step, name: str, setup: Setup, rank: Alone) -> None:
    """Peak memory over the prediction."""
    wanted = ("<=", AT_MOST) if setup.options.backend == "triton" else None
    given = sum(x.nbytes for x in rank.x[:4])
    predicted = peaks(setup.provider, setup.problem, setup.options, index=1)
    forward, (_, lse) = peak_of(rank.forward)
    delta = torch.zeros_like(lse)
    backward, _ = peak_of(lambda: rank.backward(lse, delta))
    for phase, measured, bytes_ in zip(Peaks._fields, (forward, backward), predicted, strict=True):
        detail = {"measured": show_bytes(measured), "predicted": show_bytes(bytes_), "inputs": show_bytes(given)}
        title, what = "peak memory over the prediction", f"{name}, {phase}"
        step.figure(title, what, measured / bytes_, wanted, of_timed(setup, step.device), **detail)


def waits(rank: Alone) -> str:
    """What made the host wait for the device, or ""."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rank()
    except RuntimeError as error:
        return in_a_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return ""


def peak_of[T](run: Callable[[], T]) -> tuple[int, T]:
    """Peak bytes of a call beside what was allocated before, and its result; counted by the meter on the CPU."""
    if not torch.cuda.is_available():
        with Meter() as meter:
            found = run()
        return meter.peak, found
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, found


if __name__ == "__main__":
    main()
