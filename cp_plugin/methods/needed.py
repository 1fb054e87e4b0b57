"""Needed: of the keys and values of other ranks, only those that the queries here see.

    own keys  | rows of 1 and 3 | rows of 0 and 4      forward    k, v of a stage travel while the one before it is
    post 1    | post 2          |                                 computed
    attend    | attend, merge   | attend, merge        backward   k, v again; each stage's dk, dv go home after it

Layout and mask say which keys these are (``cp_plugin.core.needs``): under a window the end of the shard before, in
packed documents the rows of those that are cut, under a causal mask alone all that is earlier. A row travels straight
to each rank that sees it and nowhere else, so no method that leaves queries in place can send fewer bytes. Ranks that
have nothing for each other exchange no message.

Near ranks come first. A stage brings a rank no more rows than it holds itself, as a hop of a ring does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from cp_plugin.comm import Mesh, Pending, sums
from cp_plugin.comm.mesh import Tensors
from cp_plugin.core.layout import Layout
from cp_plugin.core.mask import Mask
from cp_plugin.core.needs import needs, rows_of
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.core.recent import Recent
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Owners, Partial, Queries, Sums
from cp_plugin.kernels.merge import accumulator, add_sums
from cp_plugin.methods.gradient_dtype import with_gradient_dtype
from cp_plugin.methods.local import Local
from cp_plugin.methods.moves import no_gradients
from cp_plugin.methods.protocol import Formula, Provider
from cp_plugin.placement.layouts import get_layout

AXIS = "cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What travels at one time. Other ranks are in the order of the axis."""

    leaving: tuple[tuple[range, ...], ...]
    """Which rows of ours each rank sees."""
    sent: tuple[int, ...]
    """How many these are."""
    received: tuple[int, ...]
    """How many rows come from each rank."""
    attend: Local
    """Attention over the keys that come."""

    def __bool__(self) -> bool:
        """Whether any keys come to this rank."""
        return any(self.received)


@dataclass(frozen=True, slots=True)
class Needed:
    """Fetch the keys and values that the queries here see along ``axis``."""

    mesh: Mesh
    axis: str
    local: Local
    known: Recent[tuple[tuple[int, ...], ...], tuple[Stage, ...]] = field(
        default_factory=lambda: Recent(4), compare=False
    )
    """Owners of queries and of keys here -> the stages."""

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
        arriving = self._fetch(kv, stages[:1])
        grads = self.local.backward(queries, kv, onto) or add_sums(onto, no_gradients(queries, kv))
        if not stages:
            return grads
        dq, (dk, dv), home = grads.dq, map(accumulator, grads[1:]), []
        for number, stage in enumerate(stages, start=1):
            seen = arriving.wait()
            arriving = self._fetch(kv, stages[number : number + 1])
            grads = stage.attend.backward(queries, seen, Sums(dq=dq)) if stage else None
            dq, *dkv = (dq, *map(torch.zeros_like, seen.tensors)) if grads is None else grads
            home.append(self._send_home(dkv, stage))
        for stage, coming in zip(stages, home, strict=True):
            _add_rows((dk, dv), coming.wait(), stage.leaving)
        return Gradients(dq, dk, dv)

    def _fetch(self, kv: KeyValues, stages: tuple[Stage, ...]) -> Pending[KeyValues]:
        """The keys and values that come in this stage; there may be none."""
        if not stages:
            return Pending.done(kv)
        (stage,) = stages
        rows = [r for to_rank in stage.leaving for r in to_rank]
        leaving = [torch.cat([t[r.start : r.stop] for r in rows]) if rows else t[:0] for t in kv.tensors]
        arriving = self.mesh.all_to_all_v(self.axis, leaving, stage.sent, stage.received)
        return Pending(lambda: KeyValues(*arriving.wait()))

    def _send_home(self, dkv: Sequence[Tensor], stage: Stage) -> Pending[Tensors]:
        """Gradients of keys and values go to the ranks that these came from."""
        return self.mesh.all_to_all_v(
            self.axis, [*map(accumulator, dkv)], stage.received, stage.sent, group=sums(self.axis)
        )

    def _stages(self, queries: Owners, keys: Owners) -> tuple[Stage, ...]:
        here = self.mesh.index
        return self.known.get((queries(here), keys(here)), lambda: self._planned(queries, keys))

    def _planned(self, queries: Owners, keys: Owners) -> tuple[Stage, ...]:
        local, ranks = self.local, self.mesh.row(self.axis, self.mesh.index)
        here, held = self.mesh.coordinates[self.axis], [local.keys(_of(keys, rank)) for rank in ranks]
        found = needs([local.segments(_of(queries, rank)) for rank in ranks], held, local.mask)
        stages = []
        for peers in _in_turn(found.counts(len(ranks)), sum(map(len, held[here]))):
            leaving, arriving = [], []
            for rank in range(len(ranks)):
                leaving.append(found.rows(rank, here) if (rank - here) % len(ranks) in peers else ())
                arriving.append(found.rows(here, rank) if (here - rank) % len(ranks) in peers else ())
            positions = tuple(s for rank, rows in enumerate(arriving) for s in rows_of(held[rank], rows))
            sent, received = (tuple(sum(map(len, rows)) for rows in side) for side in (leaving, arriving))
            stages.append(Stage(leaving=tuple(leaving), sent=sent, received=received, attend=local.over(positions)))
        return tuple(stages)


def _of(owners: Owners, rank: int) -> Owners:
    """Whose tokens another rank's tensor holds."""
    held = owners(rank)
    return lambda _: held


def _in_turn(counts: Tensor, most: int) -> list[list[int]]:
    """In which stage rows travel from a rank to the one so many places up the axis.

    Every rank finds the same, since both ends of a message must agree on its stage.

    Args:
        counts: how many rows of each rank (column) every rank (row) sees.
        most: rows that a stage brings a rank, if there is a choice.
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


def _add_rows(totals: Tensors, parts: Tensors, of_ranks: tuple[tuple[range, ...], ...]) -> None:
    """Add what each rank found for rows of ours, one rank's after the other's."""
    rows = [r for of_rank in of_ranks for r in of_rank]
    for total, part in zip(totals, parts, strict=True):
        for r, found in zip(rows, part.split(list(map(len, rows))), strict=True):
            total[r.start : r.stop] += found


@lru_cache(64)
def _counts(layout: Layout, seq_length: int, size: int, mask: Mask) -> Tensor:
    """How many rows of each rank (column) every rank (row) sees."""
    held = [layout.segments(seq_length, size, index) for index in range(size)]
    return needs(held, held, mask).counts(size)


def _axes(size: int, options: Options) -> dict[str, int]:
    return {AXIS: size}


def _build(mesh: Mesh, local: Local, problem: Problem, options: Options) -> Needed:
    return Needed(mesh, AXIS, local)


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """The rows of k and v that others see, in each pass; and dk, dv of the rows that this rank sees of others."""
    layout = problem.placed or get_layout(options.layout or LAYOUTS[0])
    counts = _counts(layout, problem.seq_length, problem.size, problem.mask())
    of_ours, of_others = (
        [rows for i, rows in enumerate(side[index].tolist()) if i != index] for side in (counts.T, counts)
    )
    fetched = sum(_bytes(problem, rows) for rows in of_ours)
    home = sum(of_others) * problem.kv_elements // (problem.tokens // problem.batch) * problem.sum_bytes
    found = {("forward", AXIS): fetched, ("backward", AXIS): fetched + home}
    return {line: nbytes for line, nbytes in found.items() if nbytes}


def _bytes(problem: Problem, rows: int) -> int:
    """Of k and v of so many tokens of each sequence of the batch, as they travel between two ranks."""
    heads = problem.batch * problem.kv_heads
    elements = rows * heads * (problem.head_dim + problem.v_head_dim)
    return elements + 2 * heads * -(-rows // problem.shared) if problem.fp8 else elements * problem.dtype.itemsize


LAYOUTS = ("zigzag", "striped", "contiguous", "documents")
PROVIDERS = (
    with_gradient_dtype(
        Provider(
            name="needed",
            summary="of other ranks' keys and values only the rows that are seen: windows and packed documents",
            layouts=LAYOUTS,
            axes=_axes,
            build=_build,
            traffic=_traffic,
            extra_groups=(sums(AXIS),),
        )
    ),
)
