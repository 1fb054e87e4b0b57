"""Compile the kernels that the check's own cases launch, for a GPU that is not here. ``pack.py`` starts it.

    TRITON_CACHE_DIR=FOLDER python ci/gpu/ahead.py CLAIMS [MODULE:STEP...]    default: all of STEPS, in this order

Several processes share the work: each takes what no other has claimed by a file in the folder CLAIMS. Every step runs
as on a GPU, on tensors without data (``tests/equipment/cuda``): it chooses, checks and launches as always, and Triton
compiles what is launched and stops there. Nothing is compared or timed, and ranks run alone: their peers send zeros.
Left out are training runs, and the kernels of libraries: fla tunes its own, which takes a GPU.

If TRITON_LIBCUDA_PATH names a stub of the driver, the C modules are compiled, too, by which Triton launches kernels.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import record
import torch
import workers
from cases import rank_of
from equipment.cuda.device import FakeCuda
from launches import Absent
from plan import PLAN
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build, driver
from triton.runtime.jit import JITFunction

from cp_plugin.engine import comm
from cp_plugin.engine.comm import Mesh, TraceMesh, threads

CAPABILITY = 90
_NAMES = ("our_kernels", "nccl", "performance", "hot_path", "extremes", "providers")
STEPS = tuple(f"{PLAN[name].module or name}:{name}" for name in _NAMES)
PLATFORMS = ("x86_64,Linux,64bit,ELF", "x86_64,Linux,64bit,")
"""What Triton puts into the keys of C modules, with and without the command ``file`` on the GPU's machine."""


def pretend(claims: Path) -> FakeCuda:
    """From now on this process has a GPU for which launches only compile; of independent groups of cases it runs those
    that it claims. Steps must be imported afterwards, inside ``with`` of the result."""
    run, generator, spread = JITFunction.run, torch.Generator, workers.spread

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        if "TRITON_LIBCUDA_PATH" in os.environ:
            compile_launcher(kernel)

    def claim_each(call: Any, groups: Iterable[Any], *, inline: bool, seconds: float) -> Any:
        own = (group for place, group in enumerate(groups) if claimed(claims, f"{call.__module__}-{place}"))
        return spread(call, own, inline=True, seconds=seconds)  # type: ignore[arg-type] # one after another

    def once(calls: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
        for name, call in calls.items():
            if "plain torch" not in name:
                call()
        return dict.fromkeys(calls, 1.0)

    driver.set_active(Absent(CAPABILITY))
    JITFunction.run = compile_only
    Tensor.data_ptr = lambda x: x.storage_offset() * x.itemsize  # type: ignore[method-assign] # memory begins at 16 n
    torch.Generator = lambda device=None: generator()  # type: ignore[assignment,misc]
    workers.spread, record.medians = claim_each, once  # type: ignore[assignment]
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


def claimed(claims: Path, what: str) -> bool:
    """Whether no other process has taken it before."""
    try:
        (claims / f"claimed-{what}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def compile_launcher(kernel: Any) -> None:
    """What loads and launches it: one module for all kernels and, up to Triton 3.6, one for its signature."""
    for platform in PLATFORMS:
        with patch.object(build, "platform_key", lambda platform=platform: platform):
            nvidia.CudaUtils()
            if "make_launcher" in vars(nvidia):
                nvidia.CudaLauncher(kernel.src, kernel.metadata)


def alone(call: Callable[[Mesh], Any], axes: Mapping[str, int], **_: Any) -> list[Any]:
    """Every rank without its peers, instead of ``run_threads``."""
    return [call(TraceMesh(dict(axes), index)) for index in range(math.prod(axes.values()))]


def ranks_of(setup: Any, documents: tuple[int, ...], device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    """``providers.errors`` without an answer: every rank's forward and backward."""
    for index in range(math.prod(setup.axes.values())):
        rank_of(setup, device, documents, index)()
    return {"out": 0.0}, {"out": 0.0}


def unanswered(x: Any, *_: Any) -> Any:
    """``brute.answer`` without one."""
    import brute

    return brute.Answer(x.dout.double(), x.q[..., 0].double(), *(y.double() for y in x[:3]))


def run_step(module: ModuleType, name: str) -> None:
    """Run one step; what it finds is thrown away."""
    stand_ins: dict[str, Any] = {
        "first_words": lambda *_: (None, {"reason": "ranks are threads"}),
        **dict.fromkeys(("compute_answers", "start"), lambda *_: None),
        "compare_to_answer": lambda *arguments: (module.call(*arguments), (True, {}))[1],
        "errors": ranks_of,
        "RACE_S": 0.01,
    }
    for what in set(stand_ins) & set(vars(module)):
        setattr(module, what, stand_ins[what])
    with tempfile.TemporaryDirectory() as out, patch("brute.answer", unanswered):
        record.Step(name, Path(out), 1e9).run(getattr(module, name))


def main() -> None:
    claims, targets = Path(sys.argv[1]), sys.argv[2:] or STEPS
    with pretend(claims):
        for target in targets:
            module_name, _, name = target.partition(":")
            module = importlib.import_module(module_name)
            if "check_each" in vars(module) or claimed(claims, name):
                run_step(module, name)


if __name__ == "__main__":
    main()
