"""Shift a sharded sequence along its tokens: ``y[p] = x[p + by]``, 0 beyond the ends.

Multi-token prediction asks for the next token of every token (by 1). Its holder depends on the layout (four ranks,
tokens sent, and their destinations):

    contiguous   one: the first one, to the rank before
    zigzag       two: the first one of each chunk, to the rank before and to the one after
    striped      all of them, to the rank before
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cp_plugin.engine.attention import agreement, autocast
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import WHOLE, GroupMesh, connect
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.core.layout import Layout


@eager
def shift(cp: ContextParallel, x: Tensor, dim: int = 0, by: int = 1) -> Tensor:
    """This rank's tokens of the shifted sequence: ``x`` and the result are shards along ``dim``; differentiable.

    Collective over all ranks.

    Raises:
        ValueError: for a ``cp`` made from a mesh of several axes without the process group ``WHOLE``, or a call
            (compared at first, and rarely after) other than that of other ranks.
    """
    with agreement.compare_call(cp, "shift", (x,)) as settings:
        settings |= {"dim": dim % x.dim(), "tokens": x.size(dim), "by": by}
    _meet(cp)
    return _Shift.apply(x, dim % x.dim(), by, cp, "forward")


def _meet(cp: ContextParallel) -> None:
    """See to it that the mesh has a process group of all ranks: the caller's."""
    mesh = cp.mesh
    if mesh.size == 1 or not isinstance(mesh, GroupMesh) or WHOLE in mesh.groups:
        return
    group = cp.group or next((mesh.groups[axis] for axis, n in mesh.axes.items() if n == mesh.size), None)
    if group is None:
        raise ValueError(
            f"a shift needs a process group of all {mesh.size} ranks, but this mesh only has {sorted(mesh.groups)}: "
            f"create it with the group {WHOLE!r} too, or pass group= to ContextParallel instead of a mesh"
        )
    connect({WHOLE: group})  # a shift may be between some of the ranks only
    mesh.groups[WHOLE] = group


class _Shift(torch.autograd.Function):
    """Linear: the gradient is shifted back by the same operation, so it can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, by: int, cp: ContextParallel, phase: str) -> Tensor:
        ctx.dim, ctx.by, ctx.cp = dim, by, cp
        rows = x.movedim(dim, 0)
        with cp.mesh.ledger.phase(phase), autocast.off(x.device.type):
            messages = _plan(cp.layout, cp.numbers, cp.index, rows.size(0) * cp.size, by, x.device)
            under_way = [cp.mesh.exchange(WHOLE, (rows[m.send],), to=m.to, source=m.source) for m in messages]
            shifted = torch.zeros_like(rows, memory_format=torch.contiguous_format)
            for message, pending in zip(messages, under_way, strict=True):
                shifted[message.put] = pending.wait()[0][: len(message.put)]
            return shifted.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Shift.apply(grad, ctx.dim, -ctx.by, ctx.cp, "backward"), None, None, None, None


class _Message(NamedTuple):
    """What every rank sends to the rank some places below it in the layout, at the same time; or keeps to itself."""

    to: int
    source: int
    send: Tensor
    """Indices of the tokens to send, padded to the longest message of any rank."""
    put: Tensor
    """Destinations of the received tokens; the rest of the message is padding."""


@lru_cache(maxsize=32)
def _plan(
    layout: Layout, numbers: tuple[int, ...], index: int, seq_length: int, by: int, device: torch.device
) -> tuple[_Message, ...]:
    """Messages with device-resident indices, 16 bytes per token of this rank, computed once per length.

    numbers: rank -> its number in the layout. Every rank finds the same messages.
    """
    size, own = len(numbers), numbers[index]
    owner = torch.empty(seq_length, dtype=torch.int64)
    place = torch.empty(seq_length, dtype=torch.int64)
    for number in range(size):
        at = layout.positions(seq_length, size, number)
        owner[at], place[at] = number, torch.arange(len(at))
    goal = torch.arange(max(0, -by), max(0, -by, min(seq_length, seq_length - by)))
    gives, gets = owner[goal + by], owner[goal]
    away = (gives - gets) % size
    messages = []
    for places in away.unique().tolist():
        pairs = away == places
        sent, got = place[(goal + by)[pairs & (gives == own)]], place[goal[pairs & (gets == own)]]
        longest = int(gives[pairs].bincount().max())
        messages.append(
            _Message(
                to=numbers.index((own - places) % size),
                source=numbers.index((own + places) % size),
                send=pad(sent, (0, longest - len(sent))).to(device),
                put=got.to(device),
            )
        )
    return tuple(messages)
