"""Accounting of a device without hardware: launches, bytes, allocations, and host waits.

    launch      one per torch operation that reaches the device, and per call of our kernels or a library's; none for
                views, ``empty``, and results without elements
    bytes       inputs are read once, outputs written once, in-place arguments both; elements repeated by a stride of 0
                count once
    allocation  a tensor with memory of its own (none without elements); ``peak`` is the most alive at once

An operation that torch splits into several kernels (a softmax of odd sizes, a sort) counts once, so bytes are a lower
bound.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_plugin.planner.trace.memory import Meter, Quiet

_ROOT = f"{Path(__file__).parents[3]}/"
_OURS = (f"{_ROOT}cp_plugin/", f"{_ROOT}kernels/")
_MAKES_NO_KERNEL = frozenset(
    ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "lift_fresh", "alias")
)
_READS_NO_FIRST = frozenset(
    ("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
"""The first tensor is only written, or only a template."""
_VIEWS = frozenset(("_unsafe_view", "_reshape_alias"))


class Launch(NamedTuple):
    """Something that runs on the device, and the line of this package that launches it."""

    name: str
    place: str
    nbytes: int


class Wait(NamedTuple):
    """A place where the host waits for the device."""

    what: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.what}"


class Ops(Quiet):
    """The record of one device."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.waits: list[Wait] = []
        self.allocations = 0
        self.meter = Meter()
        self.plans: dict[tuple[threading.Thread, Hashable], tuple[tuple[int, ...], ...]] = {}
        """What cuDNN keeps for good: by thread and key, the strides of its first call's out and dout."""
        self._before = 0

    def clear(self) -> None:
        """Reset everything except memory that is still alive."""
        self.launches, self.waits, self.allocations = [], [], 0
        self.meter.peak = self._before = self.meter.live

    @property
    def peak(self) -> int:
        """Peak bytes beside those alive at the last ``clear``."""
        return self.meter.peak - self._before

    @property
    def nbytes(self) -> int:
        return sum(launch.nbytes for launch in self.launches)

    @property
    def counts(self) -> Counter[str]:
        return Counter(launch.name for launch in self.launches)

    def wait(self, what: str) -> None:
        if not self._quiet:
            self.waits.append(Wait(what, place()))

    def plan(self, key: Hashable, *keyed: Tensor, others: Sequence[Tensor] = ()) -> None:
        """cuDNN finds a graph by these sizes and strides, and built it with the strides of others in the first call."""
        of = threading.current_thread(), (key, *((x.shape, x.stride(), x.dtype) for x in keyed))
        strides = tuple(x.stride() for x in others)
        built = self.plans.setdefault(of, strides)
        assert built == strides, f"out and dout have strides {strides} in a plan for {built}"

    def launch(self, name: str, read: Iterable[Any], made: Iterable[Any]) -> None:
        """Record a kernel that reads ``read`` and returns ``made``."""
        if self._quiet:
            return
        made = cuda_tensors(made)
        with torch._C.DisableTorchFunction():
            self._allocated(made)
        self._launched(name, [*cuda_tensors(read), *made])

    def torch(self, func: Any, args: Any, named: Any, result: Any) -> None:
        """Record an operation of torch."""
        name = func.overloadpacket.__name__
        if name == "_scaled_dot_product_cudnn_attention":
            self.plan((name, *args[6:]), *args[:3])
        elif name == "_scaled_dot_product_cudnn_attention_backward":
            self.plan((name, *args[14:]), *args[1:4], others=(args[4], args[0]))
        if self._quiet or func.is_view or name in _VIEWS:
            return
        written = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += cuda_tensors(args[i] if i < len(args) else named.get(argument.name))
        made = [x for x in cuda_tensors(result) if not any(x is y for y in written)]
        if name in _MAKES_NO_KERNEL:
            self._allocated(made if name not in ("detach", "alias", "lift_fresh") else [])
            return
        self._allocated(made)
        if any(x.numel() for x in (*written, *made)):
            read = cuda_tensors((args, named))
            if name in _READS_NO_FIRST:
                read = read[1:]
            self._launched(name, [*read, *written, *made])

    def _allocated(self, made: Iterable[Tensor]) -> None:
        for x in made:
            self.allocations += x.numel() > 0
            self.meter.count(x)

    def _launched(self, name: str, touched: Iterable[Tensor]) -> None:
        self.launches.append(Launch(name, place(), sum(map(distinct_bytes, touched))))


def all_tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def cuda_tensors(tree: Any) -> list[Tensor]:
    """Those on the device."""
    with torch._C.DisableTorchFunction():
        return [x for x in all_tensors(tree) if x.is_meta]


def distinct_bytes(x: Tensor) -> int:
    """Bytes of a tensor, counting elements repeated by a stride of 0 once."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return prod(size if stride else min(size, 1) for size, stride in sizes) * x.element_size()


def place() -> str:
    """The innermost running line of this package, as ``file:line function``."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            return f"{code.co_filename[len(_ROOT) :]}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "outside of this package"
