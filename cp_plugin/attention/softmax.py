"""Softmax attention by any composed method: forward alone, and as the one autograd.Function for it in this package.

A method may have moves around it that are made once (``Kept``): what they brought is kept for the backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.attention import sinks
from cp_plugin.attention.recompute import once
from cp_plugin.comm import Mesh, Pending
from cp_plugin.kernels import fused
from cp_plugin.methods.moves import Move, bring, no_gradients, nothing_seen, peel
from cp_plugin.methods.protocol import At, Attend, own


class Attended(NamedTuple):
    """What a forward computed and received, for its backward and for a recomputation."""

    home: Tensor
    """The output of this rank's own rows."""
    out: Tensor
    """That of the rows that the moves brought; ``lse`` is theirs too."""
    lse: Tensor
    brought: tuple[Tensor | None, ...]
    """q, k and v behind the moves, None where no move changed them."""
    q_at: At
    kv_at: At


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, moves: tuple[Move, ...], core: Attend) -> Attended:
    q_side, kv_side, q_at, kv_at = bring(moves, (q,), (k, v), own, own)
    x = (*q_side.wait(), *kv_side.wait())
    out, lse = core.forward(x[0], x[1], x[2], q_at, kv_at) or nothing_seen(x[0], x[2])
    if sink is not None:
        out, lse = sinks.apply(out, lse, sink[sinks.held(sink.numel(), moves)])
    out = out.to(q.dtype)
    home = Pending.done((out,))
    for move in reversed(moves):
        home = move.return_out(home)
    brought = tuple(None if other is before else other for before, other in zip((q, k, v), x, strict=True))
    return Attended(home.wait()[0], out, lse, brought, q_at, kv_at)


class Attention(torch.autograd.Function):
    """Any composed method as one differentiable operation. Kept moves are made around it, once in each direction."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, method: Attend, mesh: Mesh) -> Tensor:
        moves, core = peel(method)
        with mesh.ledger.phase("forward"):
            done = once(lambda: attend(q, k, v, sink, moves, core))
        x = [before if other is None else other for before, other in zip((q, k, v), done.brought, strict=True)]
        ctx.save_for_backward(*x, sink, done.out, done.lse)
        ctx.moves, ctx.core, ctx.mesh, ctx.q_at, ctx.kv_at = moves, core, mesh, done.q_at, done.kv_at
        return done.home.detach()  # what may be kept must not get a history

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        with ctx.mesh.ledger.phase("backward"):
            side, at = Pending.done((dout,)), own
            for move in ctx.moves:
                side, at = move.bring_q(side, at)
            (dout,) = side.wait()
            delta = fused.delta(dout, out)
            dsink = None
            if sink is not None:
                dsink = sinks.gradient(sink, sinks.held(sink.numel(), ctx.moves), lse, delta)
            grads = ctx.core.backward(dout, q, k, v, lse, delta, ctx.q_at, ctx.kv_at) or no_gradients(q, k, v)
            dq, dkv = Pending.done((grads.dq.to(q.dtype),)), Pending.done((grads.dk.to(q.dtype), grads.dv.to(q.dtype)))
            for move in reversed(ctx.moves):
                dq, dkv = move.return_dq(dq), move.return_dkv(dkv)
            return *(t.to(q.dtype) for t in (*dq.wait(), *dkv.wait())), dsink, None, None
