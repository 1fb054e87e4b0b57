"""Compile launches of the kernels for GPUs that are not present.

    with launches(90) as made:
        merge_into(out, lse, part_out, part_lse)      # tensors of empty_cuda()
    made[0].ptx

The launching code runs as on a GPU, on tensors without data on ``cuda:0``; Triton specializes and compiles through
``JITFunction.run`` and stops before the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
"""Of a grid's three axes."""
_CUDA = FakeTensorMode(allow_non_fake_inputs=True)
"""One per process: tables of the attention kernels are cached across calls."""


class Absent:
    """The driver interface that Triton needs to compile."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # what was compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch and its compiled kernel."""

    kernel: str
    grid: tuple[int, ...]
    ptx: str
    cubin: bytes
    """Machine code."""
    shared: int
    """Bytes of shared memory of a program."""


def empty_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without data on ``cuda:0``; use inside ``launches`` only."""
    return torch.empty(shape, dtype=dtype, device="cuda:0")


@contextmanager
def launches(capability: int) -> Iterator[list[Launch]]:
    """Launches inside the ``with`` block, compiled for a GPU of this compute capability, such as 90.

    Raises:
        ValueError: for a grid that no GPU supports.
    """
    made: list[Launch] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        compiled = run(self, *args, grid=grid, warmup=True, **named)
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        made.append(
            Launch(
                kernel=self.__name__,
                grid=_checked(grid(arguments) if callable(grid) else tuple(grid)),
                ptx=compiled.asm["ptx"],
                cubin=compiled.asm.get("cubin", b""),  # a test may leave out the compiler
                shared=compiled.metadata.shared,
            )
        )

    driver.set_active(Absent(capability))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
        mock.patch.object(Tensor, "pin_memory", lambda self: self),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _address),
        mock.patch.object(
            Tensor, "data_ptr", lambda x: _address(x.untyped_storage()) + x.storage_offset() * x.itemsize
        ),
        _CUDA,
    ):
        yield made


def _address(storage: torch.UntypedStorage) -> int:
    """A distinct multiple of 512 per storage, like the allocator's."""
    return storage._cdata << 9


def _checked(grid: tuple[int, ...]) -> tuple[int, ...]:
    if not all(1 <= n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=False)):
        raise ValueError(f"a grid of {grid} programs: a GPU takes 1 .. {MOST_PROGRAMS}")
    return grid
