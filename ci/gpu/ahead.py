"""Compile the kernels that the check's own cases launch, for a GPU that is not here. ``pack.py`` starts it.

    TRITON_CACHE_DIR=FOLDER python ci/gpu/ahead.py I N [STEP...]    part I of N, counted from 0; default: all of STEPS

Every step runs as on a GPU, on tensors without data (``tests/fake_cuda``): it chooses, checks and launches as always,
and Triton compiles what is launched and stops there. What the cases compute is meaningless, and ranks run alone: their
peers send zeros. Left out are Megatron's training, and the kernels of libraries: fla tunes its own, which takes a GPU.
"""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import record
import spread
import torch
from fake_device import FakeCuda
from launches import Absent
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cp_plugin import comm
from cp_plugin.comm import Mesh, TraceMesh, threads

CAPABILITY = 90
STEPS = ("our_kernels", "nccl", "hot_path", "performance", "extremes", "providers")


def pretend(part: int, parts: int) -> FakeCuda:
    """From now on this process has a GPU for which launches only compile; of independent groups of cases it runs its
    part. Steps must be imported afterwards, inside ``with`` of the result."""
    run, generator, of_groups = JITFunction.run, torch.Generator, spread.spread

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **named)

    def in_turn(call: Any, groups: Sequence[Any], *, here: bool, seconds: float) -> Any:
        return of_groups(call, groups[part::parts], here=True, seconds=seconds)

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        return 1.0

    driver.set_active(Absent(CAPABILITY))
    JITFunction.run = compile_only
    Tensor.data_ptr = lambda x: x.storage_offset() * x.itemsize  # type: ignore[method-assign] # memory begins at 16 n
    torch.Generator = lambda device=None: generator()  # type: ignore[assignment,misc]
    spread.spread, record._milliseconds = in_turn, milliseconds  # type: ignore[assignment]
    comm.run_threads = threads.run_threads = alone  # type: ignore[assignment]
    properties = SimpleNamespace(name="absent", total_memory=80 << 30, multi_processor_count=132)
    stubs: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "set_sync_debug_mode": lambda mode: None,
        "Stream": lambda device=None: None,
        "stream": lambda stream: nullcontext(),
        **dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), lambda: None),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), lambda: 1),
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    return FakeCuda(divmod(CAPABILITY, 10))


def alone(call: Callable[[Mesh], Any], axes: Mapping[str, int], **_: Any) -> list[Any]:
    """Every rank without its peers, instead of ``run_threads``."""
    return [call(TraceMesh(dict(axes), index)) for index in range(math.prod(axes.values()))]


def step(name: str) -> None:
    """Run one step; what it finds is thrown away."""
    module = importlib.import_module(name)
    stand_ins = {"starts": lambda *_: "ranks are threads", "warm": lambda *_: None, "RACE_S": 0.01}
    for what in set(stand_ins) & set(vars(module)):
        setattr(module, what, stand_ins[what])
    with tempfile.TemporaryDirectory() as out, suppress(SystemExit):
        sys.argv = [name, "--out", out, "--seconds", "1e9"]
        module.main()


def main() -> None:
    part, parts = map(int, sys.argv[1:3])
    names = sys.argv[3:] or STEPS
    with pretend(part, parts):
        for place, name in enumerate(names):
            if "check_each" in vars(importlib.import_module(name)) or place % parts == part:
                step(name)


if __name__ == "__main__":
    main()
