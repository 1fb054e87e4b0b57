"""Moves: communication around a core method.

A move brings the query side (q; in the backward also dout, lse and delta) and the key/value side to other ranks, and
returns the results:

    bring_q    queries  ->          -> return_out  out, lse          -> return_dq   dq
    bring_kv   k, v     ->   core                                    -> return_dkv  dk, dv

``return_dq`` and ``return_dkv`` are the transposes of ``bring_q`` and ``bring_kv``. Every verb takes a ``Pending``,
waits for it if it has to move it, and returns its own; so both sides of all moves are under way before the core waits.
``Moved`` composes moves, outermost first, around a core:

    Moved((GatherQ(mesh, "q"), GatherKV(mesh, "kv")), local)

With several groups of heads communication and computation overlap:

    heads 0 | bring | compute | return |
    heads 1         | bring   | compute | return |
    heads 2                   | bring   | compute | return |

Kernel calls stay whole and collectives stay library collectives, which ATTENTION2D's own overlap variant (arXiv
2503.15758, Algorithms 4-6) breaks into pieces. Two groups' shards are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cp_plugin.engine.comm import Pending
from cp_plugin.engine.comm.mesh import Tensors
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.options import Option, Options, not_a_divisor, whole_number
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Shard, Sums
from cp_plugin.engine.kernels.merge import add_sums, merge
from cp_plugin.engine.methods.protocol import Attend


class Move:
    """Base of all moves: each verb leaves its side in place; a move overrides what it moves."""

    def bring_q(self, queries: Pending[Queries]) -> Pending[Queries]:
        """The query side, all of whose tensors move alike."""
        return queries

    def bring_kv(self, kv: Pending[KeyValues]) -> Pending[KeyValues]:
        return kv

    def return_out(self, partial: Pending[Tensors]) -> Pending[Tensors]:
        """``(out, lse)`` of this rank's own rows, merged over the ranks that had them."""
        return partial

    def return_dq(self, dq: Pending[Tensors]) -> Pending[Tensors]:
        """``(dq,)`` of this rank's own rows, summed over the ranks that had them."""
        return dq

    def return_dkv(self, dkv: Pending[Tensors]) -> Pending[Tensors]:
        """``(dk, dv)`` of this rank's own keys, summed over the ranks that had them."""
        return dkv

    def heads(self, count: int) -> slice:
        """Return which of ``count`` query heads this rank has after the move."""
        return slice(0, count)


@dataclass(frozen=True, slots=True)
class Moved:
    """An ``Attend``: moves, outermost first, around a core."""

    moves: tuple[Move, ...]
    core: Attend
    groups: int = 1
    """Groups of key/value heads with their query heads: one is computed while others travel."""
    kept: bool = False
    """Whether the differentiable operation keeps what the moves brought, and starts its backward there."""

    def forward(self, queries: Queries, kv: KeyValues, onto: Partial | None = None) -> Partial | None:
        dtype, groups = queries.q.dtype, head_groups(self.groups, queries, kv)
        arriving, leaving, parts = bring(self.moves, *groups[0]), None, []
        for following in (*groups[1:], None):
            brought, arriving = arriving, bring(self.moves, *following) if following else None  # post
            queries, kv = brought.queries.wait(), brought.kv.wait()  # wait
            out, lse = self.core.forward(queries, kv) or nothing_seen(queries, kv)  # attend
            del brought, queries, kv  # large, and no longer needed
            home = Pending.done((out.to(dtype), lse))
            del out, lse
            for move in reversed(self.moves):
                home = move.return_out(home)  # post
            if leaving:
                parts.append(leaving.wait())  # wait
            leaving = home
        return merge(onto, Partial(*join_heads([*parts, home.wait()])))  # merge

    def backward(self, queries: Queries, kv: KeyValues, onto: Sums = NO_SUMS) -> Gradients | None:
        groups = head_groups(self.groups, queries, kv)
        arriving, leaving, parts = bring(self.moves, *groups[0]), None, []
        for following in (*groups[1:], None):
            brought, arriving = arriving, bring(self.moves, *following) if following else None  # post
            queries, kv = brought.queries.wait(), brought.kv.wait()  # wait
            grads = self.core.backward(queries, kv) or no_gradients(queries, kv)  # attend
            del brought, queries, kv
            dq, dkv = Pending.done(grads[:1]), Pending.done(grads[1:])
            del grads
            for move in reversed(self.moves):
                dq, dkv = move.return_dq(dq), move.return_dkv(dkv)  # post
            if leaving:
                parts.append((*leaving[0].wait(), *leaving[1].wait()))  # wait
            leaving = dq, dkv
        return add_sums(onto, Gradients(*join_heads([*parts, (*dq.wait(), *dkv.wait())])))


class Brought(NamedTuple):
    queries: Pending[Queries]
    kv: Pending[KeyValues]


def bring(moves: Sequence[Move], queries: Queries, kv: KeyValues) -> Brought:
    """Make the moves, outermost first; the last one of each side is not waited for."""
    bringing_q, bringing_kv = Pending.done(queries), Pending.done(kv)
    for move in moves:
        bringing_q = move.bring_q(bringing_q)
        bringing_kv = move.bring_kv(bringing_kv)
    return Brought(bringing_q, bringing_kv)


def head_groups(count: int, queries: Queries, kv: KeyValues) -> list[tuple[Queries, KeyValues]]:
    """Equal groups of key/value heads, each with its query heads."""
    if count == 1:
        return [(queries, kv)]

    def split[S: Shard](shard: S) -> list[S]:
        parts = zip(*(t.chunk(count, 2) for t in shard.tensors), strict=True)
        return [type(shard)(*tensors, owners=shard.owners) for tensors in parts]

    return list(zip(split(queries), split(kv), strict=True))


def join_heads(groups: Sequence[Tensors]) -> Tensors:
    """The tensors of all heads from those of their groups."""
    return groups[0] if len(groups) == 1 else tuple(torch.cat(parts, 2) for parts in zip(*groups, strict=True))


def peel(method: Attend) -> tuple[tuple[Move, ...], Attend]:
    """The kept moves around a method, outermost first, and its core."""
    moves: tuple[Move, ...] = ()
    while isinstance(method, Moved) and method.kept:
        moves, method = (*moves, *method.moves), method.core
    return moves, method


def nothing_seen(queries: Queries, kv: KeyValues) -> Partial:
    """The partial of queries that see no key."""
    q = queries.q
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    return Partial(q.new_zeros((*q.shape[:3], kv.v.size(3))), lse)


def no_gradients(queries: Queries, kv: KeyValues) -> Gradients:
    """The gradients where no query sees any key."""
    return Gradients(*map(torch.zeros_like, (queries.q, *kv.tensors)))


HEAD_GROUPS = Option(
    "head_groups",
    metavar="N",
    meaning="groups of heads; one group's messages overlap with another's computation",
    read=whole_number,
    write="a number of groups, such as 2",
    near=lambda ranks, groups: (1, 2, 4, 8),
)


def groups_do_not_divide(problem: Problem, options: Options) -> str | None:
    """Return why the key/value heads cannot be divided into the groups asked for; None if they can."""
    groups = 1 if options.head_groups is None else options.head_groups
    reason = not_a_divisor(groups, problem.kv_heads, "the {} key/value heads of a rank")
    return None if reason is None else f"{spelled('head_groups', groups)} {reason}"


_LEAST_BYTES = {"nccl": 2**23, "gloo": 2**18}
"""Least bytes of a group's queries on one rank: smaller messages and kernels cost more than they hide. Measured on
virtual clusters for Gloo; an estimate for NCCL: a message of 8 MiB takes 0.2 ms at 50 GB/s, ten times the start of its
collective, and a kernel on as many queries fills a GPU."""


def best_groups(problem: Problem, most: int = 8) -> int:
    """The number of groups if the user names none."""
    whole = problem.q_bytes
    return max(
        n
        for n in range(1, most + 1)
        if problem.kv_heads % n == 0 and (n == 1 or whole >= n * _LEAST_BYTES[problem.transport.network])
    )
