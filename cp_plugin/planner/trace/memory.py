"""How much memory a computation needs at its peak, counted exactly and without running it.

    with Meter() as meter:
        out, lse = method.forward(Queries(q), KeyValues(k, v))
    meter.peak          # bytes of all tensors made inside the block that were alive at once

On meta tensors and a ``TraceMesh`` nothing is computed or sent, so one rank of any number can be looked at on any
machine: ``peaks``. What a kernel needs for itself is not seen; ours (``--cp-backend triton``) need nothing.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_plugin.attention.calls import shapes, without_peers
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.core.without_data import Mode
from cp_plugin.kernels.recording import RecordingKernel
from cp_plugin.methods.moves import nothing_seen
from cp_plugin.methods.protocol import Provider


class Peaks(NamedTuple):
    """Bytes that one attention call makes beside its inputs, at most: what it brings, sums up and returns."""

    forward: int
    backward: int


def peaks(provider: str | Provider, problem: Problem, options: Options, index: int = 0, device: str = "meta") -> Peaks:
    """Of rank ``index``.

    Raises:
        ValueError: for options that do not fit, or a problem that the provider cannot do.
    """
    method = without_peers(provider, problem, options, index, RecordingKernel())
    q, k, v, dout, _ = (
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
    """Counts the bytes of storages that are made while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Bytes alive now."""
        self.peak = 0
        """Bytes alive at once, at most."""
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _storage(x) not in given:
                self.count(x)
        return result

    def count(self, made: Tensor) -> None:
        """Add a new tensor, until it is freed; for who sees operations without this mode."""
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
    """The same number for all views of one storage."""
    return x.untyped_storage()._cdata
