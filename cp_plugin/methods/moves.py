"""Moves: what happens to the tensors around a core method, before and after it.

A move brings the query side (q; in the backward also dout and the row statistics) and the key/value side somewhere
else, and returns the results from there:

    bring_q    queries  ->          -> return_out  out, lse          -> return_dq   dq
    bring_kv   k, v     ->   core                                    -> return_dkv  dk, dv

``return_dq`` and ``return_dkv`` are the transposes of ``bring_q`` and ``bring_kv``. Every verb takes what is pending,
waits for it if it has to move it, posts its own communication and returns that; so both sides of all moves are under
way before the core waits for any. ``Moved`` puts moves, outermost first, around a core:

    Moved((GatherQ(mesh, "q"), GatherKV(mesh, "kv")), local)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cp_plugin.comm import Pending
from cp_plugin.comm.mesh import Tensors
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Sums
from cp_plugin.kernels.merge import add_sums, merge
from cp_plugin.methods.protocol import Attend


class Move:
    """The base of all moves: each verb leaves its side where it is; a move overrides what it moves."""

    def bring_q(self, queries: Pending[Queries]) -> Pending[Queries]:
        """The query side, all of whose tensors are moved alike."""
        return queries

    def bring_kv(self, kv: Pending[KeyValues]) -> Pending[KeyValues]:
        """The key/value side."""
        return kv

    def return_out(self, partial: Pending[Tensors]) -> Pending[Tensors]:
        """``(out, lse)`` of this rank's own rows, merged over all ranks that had them."""
        return partial

    def return_dq(self, dq: Pending[Tensors]) -> Pending[Tensors]:
        """``(dq,)`` of this rank's own rows, summed over all ranks that had them."""
        return dq

    def return_dkv(self, dkv: Pending[Tensors]) -> Pending[Tensors]:
        """``(dk, dv)`` of this rank's own keys, summed over all ranks that had them."""
        return dkv

    def heads(self, count: int) -> slice:
        """Which of so many query heads this rank has after the move."""
        return slice(0, count)


class Staged(Protocol):
    """An ``Attend`` in three stages: communication in posted | compute, communication out posted | result."""

    def forward_stages(self, queries: Queries, kv: KeyValues) -> Stages[Partial]: ...

    def backward_stages(self, queries: Queries, kv: KeyValues) -> Stages[Gradients]: ...


type Stages[T] = Iterator[T | None]
"""Yields None after the first two stages, and the result after the third."""


@dataclass(frozen=True, slots=True)
class Moved:
    """An ``Attend``: moves, outermost first, around a core."""

    moves: tuple[Move, ...]
    core: Attend

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        return merge(onto, finish(self.forward_stages(queries, kv)))

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        return add_sums(onto, finish(self.backward_stages(queries, kv)))

    def forward_stages(self, queries: Queries, kv: KeyValues) -> Stages[Partial]:
        bringing_q, bringing_kv = bring(self.moves, queries, kv)
        yield None
        queries, kv = bringing_q.wait(), bringing_kv.wait()
        dtype = queries.q.dtype
        out, lse = self.core.forward(queries, kv) or nothing_seen(queries, kv)
        del queries, kv, bringing_q, bringing_kv  # what was brought is not needed any more, and is large
        partial = Pending.done((out.to(dtype), lse))
        del out
        for move in reversed(self.moves):
            partial = move.return_out(partial)
        yield None
        yield Partial(*partial.wait())

    def backward_stages(self, queries: Queries, kv: KeyValues) -> Stages[Gradients]:
        bringing_q, bringing_kv = bring(self.moves, queries, kv)
        yield None
        queries, kv = bringing_q.wait(), bringing_kv.wait()
        grads = self.core.backward(queries, kv) or no_gradients(queries, kv)
        dq, dkv = Pending.done(grads[:1]), Pending.done(grads[1:])
        del queries, kv, bringing_q, bringing_kv, grads
        for move in reversed(self.moves):
            dq, dkv = move.return_dq(dq), move.return_dkv(dkv)
        yield None
        yield Gradients(*dq.wait(), *dkv.wait())


@dataclass(frozen=True, slots=True)
class Kept(Moved):
    """Moves that are made once: the differentiable operation keeps what they brought, and its backward starts there."""


def bring(moves: Sequence[Move], queries: Queries, kv: KeyValues) -> tuple[Pending[Queries], Pending[KeyValues]]:
    """Make the moves, outermost first, and post without waiting for the last of each side."""
    bringing_q, bringing_kv = Pending.done(queries), Pending.done(kv)
    for move in moves:
        bringing_q = move.bring_q(bringing_q)
        bringing_kv = move.bring_kv(bringing_kv)
    return bringing_q, bringing_kv


def peel(method: Attend) -> tuple[tuple[Move, ...], Attend]:
    """The kept moves around a method, outermost first, and what they surround."""
    moves: tuple[Move, ...] = ()
    while isinstance(method, Kept):
        moves, method = (*moves, *method.moves), method.core
    return moves, method


def finish[T](stages: Stages[T]) -> T:
    """Run all stages that are left; the result."""
    *_, result = stages
    assert result is not None
    return result


def nothing_seen(queries: Queries, kv: KeyValues) -> Partial:
    """The partial of queries that see no key."""
    q = queries.q
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    return Partial(q.new_zeros((*q.shape[:3], kv.v.size(3))), lse)


def no_gradients(queries: Queries, kv: KeyValues) -> Gradients:
    """The gradients where no query sees any key."""
    return Gradients(*map(torch.zeros_like, (queries.q, *kv.tensors)))
