"""What happens on a device that is not there: launches, bytes, allocations, and where the host waits.

The rule by which a budget counts:

    launch      every operation of torch that reaches the device, every call of a kernel of ours or of a library: one.
                Views, memory that is made but not written (``empty``), and results of no elements are none
    bytes       what it is given is read once, what it returns is written once; what it changes in place is both. A
                tensor that repeats its elements by a stride of 0 counts once
    allocation  a tensor that has memory of its own; ``peak`` is what is alive at once

An operation that torch itself makes of several kernels (a softmax of odd sizes, a sort) counts once. Bytes are the
least that can be: caches make them no fewer, and nobody reads more.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.planner.trace.memory import Meter

_ROOT = f"{Path(__file__).parents[2]}/"
_OURS = (f"{_ROOT}cp_plugin/", f"{_ROOT}kernels/")
_MAKES_NO_KERNEL = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias")
)
_READS_NO_FIRST = frozenset(
    ("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
"""The first tensor says where to write, or what the result is like."""
_VIEWS = frozenset(("_unsafe_view", "_reshape_alias"))


class Launch(NamedTuple):
    """Something that runs on the device."""

    name: str
    place: str
    """The line of this package that asked for it."""
    nbytes: int


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


class Ops:
    """The books of one device."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self.allocations = 0
        self.meter = Meter()
        self._before = 0
        self._quiet = False

    def clear(self) -> None:
        """Forget what has happened so far, but for memory that is still alive."""
        self.launches, self.waits, self.allocations = [], [], 0
        self.meter.peak = self._before = self.meter.live

    @property
    def peak(self) -> int:
        """Bytes alive at once, at most, beside those that were before."""
        return self.meter.peak - self._before

    @property
    def nbytes(self) -> int:
        """Read and written."""
        return sum(launch.nbytes for launch in self.launches)

    @property
    def by_name(self) -> Counter[str]:
        """Launches by what is launched."""
        return Counter(launch.name for launch in self.launches)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nothing inside the ``with`` block counts."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def wait(self, what: str) -> None:
        if not self._quiet:
            self.waits.append(Wait(what, place()))

    def launch(self, name: str, given: Iterable[Any], made: Iterable[Any]) -> None:
        """A kernel that reads ``given`` and returns ``made``."""
        if self._quiet:
            return
        made = list(cuda_tensors(made))
        with torch._C.DisableTorchFunction():
            self._allocated(made)
        touched = sum(map(distinct_bytes, (*cuda_tensors(given), *made)))
        self.launches.append(Launch(name, place(), touched))

    def torch(self, func: Any, args: Any, named: Any, result: Any) -> None:
        """An operation of torch."""
        name = func.overloadpacket.__name__
        if self._quiet or func.is_view or name in _VIEWS:
            return
        written = [x for x, changed in _arguments(func, args, named) if changed]
        made = [x for x in cuda_tensors(result) if not any(x is y for y in written)]
        if name in _MAKES_NO_KERNEL:
            self._allocated(made if name not in ("detach", "alias", "lift_fresh") else [])
            return
        self._allocated(made)
        if not any(x.numel() for x in (*written, *made)):
            return
        read = list(cuda_tensors((args, named)))
        if name in _READS_NO_FIRST:
            read = read[1:]
        touched = sum(map(distinct_bytes, (*read, *written, *made)))
        self.launches.append(Launch(name, place(), touched))

    def _allocated(self, made: Iterable[Tensor]) -> None:
        for x in made:
            self.allocations += 1
            self.meter.count(x)


def _arguments(func: Any, args: Any, named: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors an operation is given, and whether it writes to them."""
    for i, argument in enumerate(func._schema.arguments):
        value = args[i] if i < len(args) else named.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        for x in cuda_tensors((value,)):
            yield x, changed


def all_tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for x in tree:
            yield from all_tensors(x)
    elif isinstance(tree, dict):
        yield from all_tensors(tuple(tree.values()))


def cuda_tensors(tree: Any) -> Iterator[Tensor]:
    """Those of them that are on the device."""
    with torch._C.DisableTorchFunction():
        found = [x for x in all_tensors(tree) if x.is_meta]
    yield from found


def distinct_bytes(x: Tensor) -> int:
    """Bytes of the elements of a tensor, those that a stride of 0 repeats once."""
    elements = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        elements *= size if stride != 0 else min(size, 1)
    return elements * x.element_size()


def place() -> str:
    """The innermost line of this package that is being run, as ``file:line function``."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            return f"{code.co_filename[len(_ROOT) :]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "outside of this package"
