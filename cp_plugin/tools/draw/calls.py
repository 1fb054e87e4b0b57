"""Record the kernel calls of a method by running it.

The ranks are threads, and every token carries its position and head number as data. A ``RecordingKernel`` replaces the
kernel and reads both from its arguments, so nothing is assumed about the method and any provider can be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.attention.calls import settled as settle
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels.blocks import RecordingKernel
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Provider


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One forward call of the kernel."""

    rank: int
    step: int
    """The rank's earlier calls for the same heads."""
    heads: tuple[int, ...]
    """Query heads."""
    queries: Tensor
    """Global positions, int64, in the order of their arrival."""
    keys: Tensor
    pairs: int
    """Visible (query, key) pairs of one head: the work."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """The calls of all ranks in one attention operation."""

    setup: Setup
    mask: Mask
    held: tuple[Tensor, ...]
    """rank -> the global positions of its tokens."""
    calls: tuple[Call, ...]

    @property
    def seq_length(self) -> int:
        return self.setup.problem.seq_length

    def work(self) -> list[list[int]]:
        """Return ``work[rank][step]``: visible pairs of all heads."""
        steps = 1 + max(call.step for call in self.calls)
        pairs = [[0] * steps for _ in self.held]
        for call in self.calls:
            pairs[call.rank][call.step] += call.pairs * len(call.heads)
        return pairs

    def mean(self) -> float:
        """Return the work of a rank under perfect balance."""
        return sum(map(sum, self.work())) / len(self.held)

    def balance(self) -> float:
        """The work of the busiest rank over the mean: 1 is perfect."""
        return max(map(sum, self.work())) / self.mean()

    def critical_path(self) -> float:
        """The work of the busiest rank of every step, summed, over the mean: 1 is perfect."""
        return sum(map(max, zip(*self.work(), strict=True))) / self.mean()

    def holders(self) -> list[int]:
        """position -> the rank that holds the token."""
        at = {int(p): rank for rank, positions in enumerate(self.held) for p in positions}
        return [at[position] for position in range(self.seq_length)]

    def seen(self, query: int) -> range:
        """Return the keys that a query sees."""
        return range(*(int(end) for end in self.mask.interval(torch.tensor([query]), self.seq_length)))

    def fetched(self) -> list[set[int]]:
        """rank -> the keys of other ranks that its kernels are given."""
        arrived: list[set[int]] = [set() for _ in self.held]
        for call in self.calls:
            arrived[call.rank] |= set(call.keys.tolist())
        return [keys - set(held.tolist()) for keys, held in zip(arrived, self.held, strict=True)]

    def ranks_of(self, head: int) -> tuple[int, ...]:
        """Return the ranks that compute some of a query head."""
        return tuple(sorted({call.rank for call in self.calls if head in call.heads}))


def record(
    provider: str | Provider,
    size: int,
    *,
    seq_length: int,
    heads: int = 0,
    kv_heads: int = 0,
    causal: bool = True,
    bounds: tuple[int, ...] = (),
    **options: Any,
) -> Recording:
    """Run the forward of a provider on ``size`` ranks and record every call of the kernel; ValueError for options that
    do not fit, a provider of linear attention, or a problem that the provider refuses.

    Args:
        heads: query heads; 0: one per rank, so that methods that divide heads can be recorded.
        kv_heads: key/value heads; 0: as many as query heads.
        bounds: where the documents of a pack begin, and its length; empty: one document.
        options: as for ``ContextParallel``.
    """
    heads = heads or size
    sizes = {"heads": heads, "kv_heads": kv_heads or heads, "seq_length": seq_length}
    typical = Problem(size=size, causal=causal, bounds=bounds, **sizes)
    settled = settle(providers.get(provider), typical, Options(**options))
    if settled.provider.kind == "linear":
        raise ValueError(
            f"provider {settled.provider.name!r} is for linear layers, in which queries attend to no individual keys: "
            "cp-plugin traffic shows the bytes it sends"
        )
    if settled.reason is not None:
        raise ValueError(f"provider {settled.provider.name!r} cannot do this: {settled.reason}")
    mask = typical.mask()

    def rank(mesh: Mesh) -> tuple[Tensor, list[Call]]:
        cp = ContextParallel(settled, mesh=mesh)
        q, k = (cp.shard(_marked(seq_length, n)) for n in (heads, typical.kv_heads))
        calls: list[Call] = []
        kernel = RecordingKernel(lambda q, kv, block: calls.append(_call(mesh.index, calls, q.q, kv.k, mask)))
        cp.build_around(kernel, cp.problem(q, k, k, causal=causal), mask=mask).forward(Queries(q), KeyValues(k, k))
        return cp.positions(seq_length), calls

    held, by_rank = zip(*run_threads(rank, settled.axes), strict=True)
    return Recording(setup=settled, mask=mask, held=held, calls=tuple(call for calls in by_rank for call in calls))


def _call(rank: int, before: Sequence[Call], q: Tensor, k: Tensor, mask: Mask) -> Call:
    queries, keys = q[:, 0, 0, 0].long(), k[:, 0, 0, 0].long()
    heads = tuple(q[0, 0, :, 1].long().tolist())
    step = sum(heads[0] in call.heads for call in before)
    return Call(rank=rank, step=step, heads=heads, queries=queries, keys=keys, pairs=visible(mask, queries, keys))


def visible(mask: Mask, queries: Tensor, keys: Tensor) -> int:
    """Count visible pairs of queries and keys at these positions."""
    first, last = mask.interval(queries, 1 + int(torch.cat((queries, keys)).max()))
    before, after = (torch.searchsorted(keys.sort().values, end) for end in (first, last))
    return int((after - before).sum())


def _marked(seq_length: int, heads: int) -> Tensor:
    """``[seq_length, 1, heads, 2]``: every token's position and head, in float64."""
    marks = torch.empty(seq_length, 1, heads, 2, dtype=torch.float64)
    marks[..., 0] = torch.arange(seq_length)[:, None, None]
    marks[..., 1] = torch.arange(heads)
    return marks
