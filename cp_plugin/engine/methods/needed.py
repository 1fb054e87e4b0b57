"""Needed: fetch only the remote keys and values that this rank's queries see.

    own keys  | rows of 1 and 3 | rows of 0 and 4      forward    k, v of a stage travel while the one before it is
    post 1    | post 2          |                                 computed
    attend    | attend, merge   | attend, merge        backward   k, v again; each stage's dk, dv go home after it

Layout and mask say which keys these are (``engine.core.needs``): under a window the end of the previous shard (a
halo), in packed documents the rows of cut documents, under a causal mask alone everything earlier. A row travels
straight to each rank that sees it, so no method that leaves queries in place sends fewer bytes. Ranks that need nothing
of each other exchange no message.

Near ranks come first. A stage brings a rank no more rows than it holds itself, like a hop of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from cp_plugin.engine.comm import Mesh, Pending, sums
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.needs import needs, rows_of
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Owners, Partial, Queries, Sums
from cp_plugin.engine.kernels.merge import accumulator, add_sums
from cp_plugin.engine.methods.gradient_dtype import ONE_HOP, with_gradient_dtype
from cp_plugin.engine.methods.local import Local
from cp_plugin.engine.methods.moves import no_gradients
from cp_plugin.engine.methods.protocol import Formula, Provider
from cp_plugin.engine.placement.documents import get_layout

AXIS = "cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Rows that travel together. Per-rank fields are in axis order."""

    leaving: tuple[tuple[range, ...], ...]
    """Which of this rank's rows each rank sees."""
    sent: tuple[int, ...]
    """Their numbers."""
    received: tuple[int, ...]
    """How many rows each rank sends."""
    attend: Local
    """Attention over the received keys."""

    def __bool__(self) -> bool:
        """Return True if this rank receives any keys."""
        return any(self.received)


@dataclass(frozen=True, slots=True)
class Needed:
    """Fetch the keys and values that the queries see along ``axis``."""

    mesh: Mesh
    axis: str
    local: Local
    known: Recent[tuple[tuple[int, ...], ...], tuple[Stage, ...]] = field(
        default_factory=lambda: Recent(4), compare=False
    )
    """Owners of the queries and of the keys -> stages."""

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        stages = self._stages(queries.owners, kv.owners)
        arriving = self._fetch(kv, stages[:1])  # post
        onto = self.local.forward(queries, kv, onto)  # attend
        for number, stage in enumerate(stages, start=1):
            seen = arriving.wait()  # wait
            arriving = self._fetch(kv, stages[number : number + 1])  # post
            if stage:
                onto = stage.attend.forward(queries, seen, onto)  # attend, merge
        return onto

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        stages = self._stages(queries.owners, kv.owners)
        arriving = self._fetch(kv, stages[:1])  # post
        grads = self.local.backward(queries, kv, onto) or add_sums(onto, no_gradients(queries, kv))  # attend
        if not stages:
            return grads
        dq, (dk, dv), home = grads.dq, map(accumulator, grads[1:]), []
        for number, stage in enumerate(stages, start=1):
            seen = arriving.wait()  # wait
            arriving = self._fetch(kv, stages[number : number + 1])  # post
            grads = stage.attend.backward(queries, seen, Sums(dq=dq)) if stage else None
            dq, *dkv = (dq, *map(torch.zeros_like, seen.tensors)) if grads is None else grads
            home.append(self._send_home(dkv, stage))  # post
        for stage, coming in zip(stages, home, strict=True):
            _add_rows((dk, dv), coming.wait(), stage.leaving)  # wait, add
        return Gradients(dq, dk, dv)

    def _fetch(self, kv: KeyValues, stages: tuple[Stage, ...]) -> Pending[KeyValues]:
        """Keys and values of the next stage, if there is one."""
        if not stages:
            return Pending.done(kv)
        (stage,) = stages
        rows = [r for to_rank in stage.leaving for r in to_rank]
        leaving = [_rows(t, rows) for t in kv.tensors]
        arriving = self.mesh.all_to_all_v(self.axis, leaving, stage.sent, stage.received)
        return Pending(lambda: KeyValues(*arriving.wait()))

    def _send_home(self, dkv: Sequence[Tensor], stage: Stage) -> Pending[Tensors]:
        """Return gradients of keys and values to their owners."""
        return self.mesh.all_to_all_v(
            self.axis, [*map(accumulator, dkv)], stage.received, stage.sent, group=sums(self.axis)
        )

    def _stages(self, queries: Owners, keys: Owners) -> tuple[Stage, ...]:
        rank = self.mesh.index
        return self.known.get((queries(rank), keys(rank)), lambda: self._planned(queries, keys))

    def _planned(self, queries: Owners, keys: Owners) -> tuple[Stage, ...]:
        """Plan which rows travel in which stage, from the positions of all ranks."""
        local, ranks = self.local, self.mesh.row(self.axis, self.mesh.index)
        place, held = self.mesh.coordinates[self.axis], [local.keys(_owners_of(keys, rank)) for rank in ranks]
        runs = needs([local.segments(_owners_of(queries, rank)) for rank in ranks], held, local.mask)
        stages = []
        for peers in _plan_distances(runs.counts(len(ranks)), sum(map(len, held[place]))):
            leaving, arriving = [], []
            for rank in range(len(ranks)):
                leaving.append(runs.rows(rank, place) if (rank - place) % len(ranks) in peers else ())
                arriving.append(runs.rows(place, rank) if (place - rank) % len(ranks) in peers else ())
            positions = tuple(s for rank, rows in enumerate(arriving) for s in rows_of(held[rank], rows))
            sent, received = (tuple(sum(map(len, rows)) for rows in side) for side in (leaving, arriving))
            attend = local.with_keys(positions)
            stages.append(Stage(leaving=tuple(leaving), sent=sent, received=received, attend=attend))
        return tuple(stages)


def _owners_of(owners: Owners, rank: int) -> Owners:
    """The owners of another rank's tensor."""
    held = owners(rank)
    return lambda _: held


def _plan_distances(counts: Tensor, most: int) -> list[list[int]]:
    """Distances up the axis over which rows travel, by stage; the same on every rank.

    Args:
        counts: rows of each rank (column) that every rank (row) sees.
        most: rows that a stage may bring a rank, unless one distance alone brings more.
    """
    size = len(counts)
    stages: list[list[int]] = []
    filled = torch.zeros(size, dtype=torch.int64)
    for distance in sorted(range(1, size), key=lambda places: min(places, size - places)):
        rows = counts[torch.arange(size), (torch.arange(size) - distance) % size]
        if not rows.any():
            continue
        if not stages or (filled + rows).max() > most:
            stages.append([])
            filled = torch.zeros_like(filled)
        stages[-1].append(distance)
        filled = filled + rows
    return stages


def _rows(t: Tensor, runs: Sequence[range]) -> Tensor:
    """These rows, one run after the other; of one run a view."""
    parts = [t[run.start : run.stop] for run in runs] or [t[:0]]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add_rows(totals: Tensors, parts: Tensors, of_ranks: tuple[tuple[range, ...], ...]) -> None:
    """Add what each rank found for rows of ours."""
    rows = [r for of_rank in of_ranks for r in of_rank]
    for total, part in zip(totals, parts, strict=True):
        for r, grad in zip(rows, part.split(list(map(len, rows))), strict=True):
            total[r.start : r.stop] += grad


@lru_cache(64)
def _counts(layout: Layout, seq_length: int, size: int, mask: Mask) -> Tensor:
    """Rows of each rank (column) that every rank (row) sees."""
    held = [layout.segments(seq_length, size, index) for index in range(size)]
    return needs(held, held, mask).counts(size)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """In each pass k, v of the rows that others see; in the backward pass dk, dv of the rows that this rank sees."""
    layout = problem.placed or get_layout(options.layout or LAYOUTS[0])
    counts = _counts(layout, problem.seq_length, problem.size, problem.mask())
    of_ours, of_others = (
        [rows for i, rows in enumerate(side[index].tolist()) if i != index] for side in (counts.T, counts)
    )
    fetched = sum(_bytes(problem, rows) for rows in of_ours)
    home = sum(of_others) * problem.kv_elements // (problem.tokens // problem.batch) * problem.sum_bytes
    formula = {("forward", AXIS): fetched, ("backward", AXIS): fetched + home}
    return {line: nbytes for line, nbytes in formula.items() if nbytes}


def _bytes(problem: Problem, rows: int) -> int:
    """Bytes of k and v of ``rows`` tokens of each sequence, as they travel between two ranks."""
    heads = problem.batch * problem.kv_heads
    elements = rows * heads * (problem.head_dim + problem.v_head_dim)
    if problem.transport.fp8:
        return elements + 2 * heads * -(-rows // problem.shared)
    return elements * problem.dtype.itemsize


LAYOUTS = ("zigzag", "striped", "contiguous", "documents")
PROVIDERS = (
    with_gradient_dtype(
        Provider(
            name="needed",
            summary="each rank receives only the keys and values that its mask allows: windows, packed documents",
            layouts=LAYOUTS,
            build=lambda mesh, local, problem, options: Needed(mesh, AXIS, local),
            traffic=_traffic,
            extra_groups=(sums(AXIS),),
        ),
        lambda options: ONE_HOP,
    ),
)
