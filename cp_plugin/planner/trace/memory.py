"""Exact peak memory of a computation, and the cost of torch's own operations, traced on meta tensors instead of run.

    with Meter() as meter:
        out, lse = method.forward(Queries(q), KeyValues(k, v))
    meter.peak          # peak bytes of tensors created inside the block

On meta tensors and a ``TraceMesh`` nothing is computed or sent, so a rank of any world size can be measured on any
machine (``peaks``). Workspaces inside kernels are not seen; ours (``--cp-backend triton``) have none. ``Passes`` counts
bytes read and written, and matrix products, besides kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from cp_plugin.engine.attention.calls import shapes, without_peers
from cp_plugin.engine.common.without_data import Kind, Mode, WithoutData, tensors_in
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels.blocks import RecordingKernel
from cp_plugin.engine.methods.moves import nothing_seen
from cp_plugin.engine.methods.protocol import Provider


class Peaks(NamedTuple):
    """Peak bytes of one attention call in addition to its inputs: receive buffers, sums and results."""

    forward: int
    backward: int


def peaks(provider: str | Provider, problem: Problem, options: Options, index: int = 0, device: str = "meta") -> Peaks:
    """Peaks of rank ``index``; ValueError for options or a problem that the provider does not support."""
    method = without_peers(provider, problem, options, index, RecordingKernel())
    q, k, v, dout, *_ = (
        None if x is None else torch.empty_like(x, device=device)
        for x in shapes(problem, problem.seq_length // problem.size)
    )
    queries, kv = Queries(q), KeyValues(k, v)
    with Meter() as forward:
        _, lse = method.forward(queries, kv) or nothing_seen(queries, kv)
    queries = Queries(q, dout, lse, torch.empty_like(lse))
    with Meter() as backward:
        method.backward(queries, kv)
    return Peaks(forward.peak, backward.peak)


class Meter(Mode):
    """Counts the bytes of storages created while active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {_storage(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _storage(x) not in inputs:
                self.count(x)
        return result

    def count(self, made: Tensor) -> None:
        """Count a new tensor until it is freed; for callers that intercept operations themselves."""
        storage = made.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _storage(x: Tensor) -> int:
    """Identity of a storage, shared by its views."""
    return x.untyped_storage()._cdata


class Quiet:
    """A count that can be suspended."""

    _quiet = False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Suspend counting."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


class Passes(Quiet, WithoutData):
    """While active, reports every operation that touches memory to ``memory`` or ``products``."""

    def __init__(self, memory: Callable[[int, int], None], products: Callable[[int, str], None], meter: Meter) -> None:
        """memory: (bytes read and written, launches); products: (FLOPs, dtype); meter: counts live tensors."""
        super().__init__()
        self._memory, self._products, self._meter = memory, products, meter
        self._inside = False  # one kernel: it has no temporaries

    def seen(self, func: Any, kind: Kind, args: Any, named: Any, result: Any) -> None:
        if kind == "view":
            return
        if kind != "in place" and not self._inside:
            for x in tensors_in((result,)):
                self._meter.count(x)
        if self._quiet or kind == "made":
            return
        if kind == "product":
            flops = flop_registry[func.overloadpacket](*args, **named, out_val=result)
            self._products(flops, dtype_name(result.dtype))
        else:
            self._memory(_touched(func, args, named, result), 1)

    def one_pass(self, name: str, operation: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """An operation of ``kernels.fused`` as one kernel that reads its arguments and writes its result once."""
        inside, self._inside = self._inside, True
        try:
            with self.unseen():
                result = operation()
        finally:
            self._inside = inside
        if not inside:
            for x in tensors_in((result,)):
                self._meter.count(x)
        if not self._quiet:
            written = _nbytes(args[:2]) if result is None else _nbytes((result,))  # in place: the accumulator
            self._memory(_nbytes(args) + written, 1)
        return result


def _touched(func: Any, args: Any, named: Any, result: Any) -> int:
    """Bytes read and written; an indexed write counts only what is put."""
    if func.overloadpacket.__name__ == "index_put_":
        return _nbytes(args[1:]) + _nbytes(args[2:3])
    return _nbytes((args, tuple(named.values()), result))


def _nbytes(tree: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(tree))
