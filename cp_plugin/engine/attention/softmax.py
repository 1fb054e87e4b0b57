"""Softmax attention by any composed method: the forward pass, and the only autograd.Function for it in this package.

Outer moves with ``Moved.kept`` are made once: the backward pass starts from what they brought.

A sink is one more score per head, with no value behind it (StreamingLLM, arXiv 2309.17453; gpt-oss):

    lse' = logaddexp(lse, sink)        out' = exp(lse - lse') out

It is applied where all keys of a query have been merged, so methods and kernels need not know: their backward is right
with lse' and out'. Its probability is ``exp(sink - lse')``, its gradient ``-exp(sink - lse') * delta``, summed over the
queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.attention import autocast
from cp_plugin.engine.attention.recompute import once
from cp_plugin.engine.comm import Mesh, Pending
from cp_plugin.engine.common.first_order import first_order
from cp_plugin.engine.core.values import KeyValues, Owners, Queries, dense
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.methods.moves import Move, bring, no_gradients, nothing_seen, peel
from cp_plugin.engine.methods.protocol import Attend


class Attended(NamedTuple):
    """Results of a forward pass, for its backward and for a recomputation."""

    home: Tensor
    """Output of this rank's own rows."""
    out: Tensor
    """Output of the rows that the moves brought; ``lse`` likewise."""
    lse: Tensor
    brought: tuple[Tensor | None, ...]
    """q, k, v behind the moves; None where unchanged."""
    owners: tuple[Owners, Owners]
    """Owners of those queries and keys."""


def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, moves: tuple[Move, ...], core: Attend) -> Attended:
    bringing_q, bringing_kv = bring(moves, Queries(q), KeyValues(k, v))
    queries, kv = bringing_q.wait(), bringing_kv.wait()
    out, lse = core.forward(queries, kv) or nothing_seen(queries, kv)
    if sink is not None:
        out, lse = apply_sink(out, lse, sink[heads_behind(sink.numel(), moves)])
    out = out.to(q.dtype)
    home = Pending.done((out,))
    for move in reversed(moves):
        home = move.return_out(home)
    x = zip((q, k, v), (queries.q, kv.k, kv.v), strict=True)
    brought = tuple(None if other is before else other for before, other in x)
    return Attended(home.wait()[0], out, lse, brought, (queries.owners, kv.owners))


@first_order
class Attention(torch.autograd.Function):
    """Any composed method as one differentiable operation, inside its kept moves."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, method: Attend, mesh: Mesh) -> Tensor:
        moves, core = peel(method)
        q, k, v = map(dense, (q, k, v))
        with mesh.ledger.phase("forward"):
            done = once(lambda: attend(q, k, v, sink, moves, core))
        x = [before if other is None else other for before, other in zip((q, k, v), done.brought, strict=True)]
        ctx.save_for_backward(*x, sink, done.out, done.lse)
        ctx.moves, ctx.core, ctx.mesh, ctx.owners = moves, core, mesh, done.owners
        return done.home.detach()  # a kept result must not get a history

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        with ctx.mesh.ledger.phase("backward"), autocast.off(dout.device.type):
            bringing = Pending.done(Queries(dense(dout)))  # dout goes where q went
            for move in ctx.moves:
                bringing = move.bring_q(bringing)
            dout = bringing.wait().q
            delta = fused.delta(dout, out)
            dsink = None
            if sink is not None:
                dsink = sink_gradient(sink, heads_behind(sink.numel(), ctx.moves), lse, delta)
            queries = Queries(q, dout, lse, delta, owners=ctx.owners[0])
            kv = KeyValues(k, v, owners=ctx.owners[1])
            grads = ctx.core.backward(queries, kv) or no_gradients(queries, kv)
            dq, dkv = Pending.done((grads.dq.to(q.dtype),)), Pending.done((grads.dk.to(q.dtype), grads.dv.to(q.dtype)))
            for move in reversed(ctx.moves):
                dq, dkv = move.return_dq(dq), move.return_dkv(dkv)
            return *(t.to(q.dtype) for t in (*dq.wait(), *dkv.wait())), dsink, None, None


def heads_behind(heads: int, moves: Sequence[Move]) -> slice:
    """The query heads this rank has behind these moves, outermost first."""
    first, count = 0, heads
    for move in moves:
        kept = move.heads(count)
        first, count = first + kept.start, kept.stop - kept.start
    return slice(first, first + count)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add these heads' sinks ``[h]`` to merged attention ``[s, b, h, e]`` and ``[s, b, h]``."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    weight = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total))
    return out.to(lse.dtype) * weight.unsqueeze(-1), total


def sink_gradient(sink: Tensor, heads: slice, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of all sinks ``[h]`` from this rank's queries and heads; lse and delta include the sink."""
    gradient = torch.zeros_like(sink)
    gradient[heads] = -(torch.exp(sink[heads].to(lse.dtype) - lse) * delta).sum((0, 1)).to(sink.dtype)
    return gradient
