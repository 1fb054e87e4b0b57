"""Compile the memory-bound kernels for a GPU that need not be there, and print what they became.

    python tests/kernels/compiled.py        JSON: compute capability -> kernel -> instruction of memory -> times

The interpreter takes code that the compiler refuses, and says nothing of how memory is read. Launches compile for
CPU tensors what they would compile for CUDA ones, and stop there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from cp_kernels import merge, payload, permute
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

INSTRUCTION = re.compile(r"^\s*(?:@%p\d+ )?((?:ld|st)\.global\S*|cvt\.\S*e4m3\S*)", re.MULTILINE)


class Absent:
    """What Triton asks of a driver to compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # what was compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(capability: int, calls: dict[str, Callable[[], object]]) -> dict[str, dict[str, int]]:
    """The memory instructions of the kernel that each call launches."""
    driver.set_active(Absent(capability))
    run, ptx = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        ptx.append(run(self, *args, grid=grid, warmup=True, **kwargs).asm["ptx"])

    JITFunction.run = compile_only
    for call in calls.values():
        call()
    JITFunction.run = run
    return {name: Counter(INSTRUCTION.findall(text)) for name, text in zip(calls, ptx, strict=True)}


def in_64_bits(module: Any, call: Callable[[], object]) -> Callable[[], object]:
    """The call as it is with tensors of 2^31 elements."""

    def made() -> None:
        usual, module.index_type = module.index_type, lambda largest: tl.int64
        call()
        module.index_type = usual

    return made


def calls() -> dict[str, Callable[[], object]]:
    """A launch of every kernel, of the shapes that models have."""
    payload._converts = lambda x: driver.active.get_current_target().arch >= 89
    outs, lses = torch.empty(4, 128, 1, 8, 128, dtype=torch.bfloat16), torch.empty(4, 128, 1, 8)
    total, order = torch.empty(128, 1, 8, 128), torch.arange(128)
    elements, exponents = torch.empty(128, 1, 8, 128, dtype=torch.float8_e4m3fn), torch.empty(2, 1, 8).byte()
    found = {
        "merge": lambda: merge.merge(outs.unbind(), lses.unbind()),
        "merge tensors": lambda: merge.merge([x.clone() for x in outs], [x.clone() for x in lses], torch.bfloat16),
        "merge_into": lambda: merge.merge_into(total, lses[0], outs[0], lses[1]),
        "merge_into rows": lambda: merge.merge_into(total[::2], lses[0, ::2], outs[0, ::2], lses[1, ::2]),
        "gather_rows": lambda: permute.gather_rows((outs[0],), order),
        "gather_rows of heads": lambda: permute.gather_rows((outs[0, :, :, :2],), order),
        "scatter_rows": lambda: permute.scatter_rows((outs[0],), order),
        "pack": lambda: payload.pack(outs[0], 64),
        "unpack": lambda: payload.unpack(elements, exponents, 64, torch.bfloat16),
    }
    long = {"merge": merge, "gather_rows": permute, "pack": payload, "unpack": payload}
    return found | {f"{name}, 64 bits": in_64_bits(module, found[name]) for name, module in long.items()}


if __name__ == "__main__":
    every = calls()
    print(
        json.dumps({"90": compiled(90, every), "80": compiled(80, {name: every[name] for name in ("pack", "unpack")})})
    )
