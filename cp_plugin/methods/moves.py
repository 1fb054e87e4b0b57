"""Moves: what happens to the tensors around a core method, before and after it.

A move brings the query side (q; in the backward also dout and the row statistics) and the key/value side somewhere
else, and returns the results from there:

    bring_q    q, dout, ...  ->          -> return_out  out, lse          -> return_dq   dq
    bring_kv   k, v          ->   core                                    -> return_dkv  dk, dv

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
from torch import Tensor

from cp_plugin.comm import Pending
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.values import NO_SUMS, Gradients, Partial, Sums
from cp_plugin.kernels.merge import add_sums, merge
from cp_plugin.methods.protocol import At, Attend


class Move:
    """The base of all moves: each verb leaves its side where it is; a move overrides what it moves."""

    def bring_q(self, tensors: Pending, at: At) -> tuple[Pending, At]:
        """Query-side tensors ``[s, b, h, ...]``, all moved alike."""
        return tensors, at

    def bring_kv(self, tensors: Pending, at: At) -> tuple[Pending, At]:
        """k and v ``[s, b, g, ...]``."""
        return tensors, at

    def return_out(self, partial: Pending) -> Pending:
        """``(out, lse)`` of this rank's own rows, merged over all ranks that had them."""
        return partial

    def return_dq(self, dq: Pending) -> Pending:
        """``(dq,)`` of this rank's own rows, summed over all ranks that had them."""
        return dq

    def return_dkv(self, dkv: Pending) -> Pending:
        """``(dk, dv)`` of this rank's own keys, summed over all ranks that had them."""
        return dkv

    def heads(self, count: int) -> slice:
        """Which of so many query heads this rank has after the move."""
        return slice(0, count)


class Staged(Protocol):
    """An ``Attend`` in three stages: communication in posted | compute, communication out posted | result."""

    def forward_stages(self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At) -> Stages[Partial]: ...

    def backward_stages(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, q_at: At, kv_at: At
    ) -> Stages[Gradients]: ...


type Stages[T] = Iterator[T | None]
"""Yields None after the first two stages, and the result after the third."""


@dataclass(frozen=True, slots=True)
class Moved:
    """An ``Attend``: moves, outermost first, around a core."""

    moves: tuple[Move, ...]
    core: Attend

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At, onto: Partial | None = None
    ) -> Partial | None:
        return merge(onto, finish(self.forward_stages(q, k, v, q_at, kv_at)))

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        q_at: At,
        kv_at: At,
        onto: Sums = NO_SUMS,
    ) -> Gradients | None:
        return add_sums(onto, finish(self.backward_stages(dout, q, k, v, lse, delta, q_at, kv_at)))

    def forward_stages(self, q: Tensor, k: Tensor, v: Tensor, q_at: At, kv_at: At) -> Stages[Partial]:
        q_side, kv_side, q_at, kv_at = bring(self.moves, (q,), (k, v), q_at, kv_at)
        yield None
        (q,), (k, v) = q_side.wait(), kv_side.wait()
        dtype = q.dtype
        out, lse = self.core.forward(q, k, v, q_at, kv_at) or nothing_seen(q, v)
        del q, k, v, q_side, kv_side  # what was brought is not needed any more, and is large
        partial = Pending.done((out.to(dtype), lse))
        del out
        for move in reversed(self.moves):
            partial = move.return_out(partial)
        yield None
        yield Partial(*partial.wait())

    def backward_stages(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, q_at: At, kv_at: At
    ) -> Stages[Gradients]:
        q_side, kv_side, q_at, kv_at = bring(self.moves, (q, dout, lse, delta), (k, v), q_at, kv_at)
        yield None
        (q, dout, lse, delta), (k, v) = q_side.wait(), kv_side.wait()
        grads = self.core.backward(dout, q, k, v, lse, delta, q_at, kv_at) or no_gradients(q, k, v)
        dq, dkv = Pending.done(grads[:1]), Pending.done(grads[1:])
        del q, dout, lse, delta, k, v, q_side, kv_side, grads
        for move in reversed(self.moves):
            dq, dkv = move.return_dq(dq), move.return_dkv(dkv)
        yield None
        yield Gradients(*dq.wait(), *dkv.wait())


@dataclass(frozen=True, slots=True)
class Kept(Moved):
    """Moves that are made once: the differentiable operation keeps what they brought, and its backward starts there."""


def bring(
    moves: Sequence[Move], q_side: tuple[Tensor, ...], kv_side: tuple[Tensor, ...], q_at: At, kv_at: At
) -> tuple[Pending, Pending, At, At]:
    """Make the moves, outermost first, and post without waiting for the last of each side."""
    q_pending, kv_pending = Pending.done(q_side), Pending.done(kv_side)
    for move in moves:
        q_pending, q_at = move.bring_q(q_pending, q_at)
        kv_pending, kv_at = move.bring_kv(kv_pending, kv_at)
    return q_pending, kv_pending, q_at, kv_at


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


def nothing_seen(q: Tensor, v: Tensor) -> Partial:
    """The partial of queries that see no key."""
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    return Partial(q.new_zeros((*q.shape[:3], v.size(3))), lse)


def no_gradients(q: Tensor, k: Tensor, v: Tensor) -> Gradients:
    """The gradients where no query sees any key."""
    return Gradients(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
