"""Memory meter: exact peak memory of a computation, traced on meta tensors instead of run.

    with Meter() as meter:
        out, lse = method.forward(Queries(q), KeyValues(k, v))
    meter.peak          # peak bytes of tensors created inside the block

On meta tensors and a ``TraceMesh`` nothing is computed or sent, so a rank of any world size can be measured on any
machine (``peaks``). Workspaces inside kernels are not seen; ours (``--cp-backend triton``) have none.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cp_plugin.attention.calls import shapes, without_peers
from cp_plugin.common.without_data import Mode
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.values import KeyValues, Queries
from cp_plugin.kernels.recording import RecordingKernel
from cp_plugin.methods.moves import nothing_seen
from cp_plugin.methods.protocol import Provider


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
        given = {_storage(x) for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _storage(x) not in given:
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
