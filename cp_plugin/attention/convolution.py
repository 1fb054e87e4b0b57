"""Short causal convolution of a sharded sequence, as in front of delta-rule and state-space layers.

    y[p] = sum_i  weight[:, w - 1 - i] * x[p - i]          i = 0 .. w - 1, within p's document

A rank needs the w - 1 tokens before each run of its own, which is what a sliding window of that width sees
(``cp_plugin.core.needs``): one message per neighbour, forward and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cp_plugin.attention.api import ContextParallel
from cp_plugin.comm import Mesh
from cp_plugin.common.eager import eager
from cp_plugin.common.first_order import first_order
from cp_plugin.core.dtypes import accumulation_dtype
from cp_plugin.core.layout import Layout
from cp_plugin.core.mask import Mask, document_bounds
from cp_plugin.core.needs import needs, rows_of
from cp_plugin.methods.registry import names


@eager
def short_convolution(
    cp: ContextParallel,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel over the whole sequence; every rank passes its shard. Collective.

    Args:
        cp: with a provider of linear attention, whose layouts keep neighbouring tokens on one rank.
        x: ``[s, b, c]``.
        weight: ``[c, w]``; its last column is for the token itself (``Conv1d(c, c, w, groups=c)`` without the middle
            dimension).
        bias: ``[c]``.
        cu_seqlens: int ``[n + 1]``: bounds of the documents, across which nothing is seen.

    Returns:
        ``[s, b, c]`` in x's dtype; gradients flow to x, weight and bias, the latter two as this rank's share of a sum
        over all ranks.

    Raises:
        ValueError: for sizes that do not fit, or a provider of softmax attention.
    """
    if cp.provider.kind != "linear":
        raise ValueError(
            f"provider {cp.provider.name!r} is for softmax attention: a short convolution goes with linear attention; "
            f"use one of {', '.join(names('linear'))}"
        )
    if weight.dim() != 2 or weight.size(0) != x.size(2) or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [None if y is None else tuple(y.shape) for y in (x, weight, bias)]
        raise ValueError(f"x, weight and bias have the shapes {shapes}: they must be [s, b, c], [c, w] and [c]")
    tokens, width = x.size(0) * cp.size, weight.size(1)
    documents = () if cu_seqlens is None else document_bounds(cu_seqlens, tokens)
    plan = _planned(cp.layout, cp.numbers, cp.index, tokens, width, documents, x.device)
    return _Convolution.apply(x, weight, bias, plan, cp.mesh)


@dataclass(frozen=True, slots=True)
class _Plan:
    leaving: Tensor
    """Rows of this rank that others need, by rank: int64."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    before: tuple[Tensor, ...]
    """For i = 1 .. w - 1, where the token i before each of this rank's tokens is: int64 ``[s]``."""


class _Convolution(torch.autograd.Function):
    """Saves the tokens once; all sums are in the accumulation dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, mesh: Mesh) -> Tensor:
        with mesh.ledger.phase("forward"):
            fetched = _sent(mesh, x[plan.leaving], plan.sent, plan.received)
        rows = torch.cat((x, fetched, x.new_zeros((1, *x.shape[1:]))))
        taps = weight.to(accumulation_dtype(x.dtype))
        out = x * taps[:, -1]
        for back, place in enumerate(plan.before, start=1):
            out += rows.index_select(0, place) * taps[:, -1 - back]
        ctx.save_for_backward(rows, weight, bias)
        ctx.plan, ctx.mesh = plan, mesh
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        plan, tokens, wide = ctx.plan, dout.size(0), accumulation_dtype(dout.dtype)
        dout, taps = dout.to(wide), weight.to(wide)
        drows = torch.zeros(rows.shape, dtype=wide, device=rows.device)
        drows[:tokens] = dout * taps[:, -1]
        of_taps = [(dout * rows[:tokens]).sum((0, 1))]
        for back, place in enumerate(plan.before, start=1):
            drows.index_add_(0, place, dout * taps[:, -1 - back])
            of_taps.append((dout * rows.index_select(0, place)).sum((0, 1)))
        with ctx.mesh.ledger.phase("backward"):
            returned = _sent(ctx.mesh, drows[tokens:-1].to(rows.dtype), plan.received, plan.sent)
        dx = drows[:tokens].index_add_(0, plan.leaving, returned.to(wide)).to(rows.dtype)
        dweight = torch.stack(of_taps[::-1], 1).to(weight.dtype)
        return dx, dweight, None if bias is None else dout.sum((0, 1)).to(bias.dtype), None, None


def _sent(mesh: Mesh, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
    """The rows that arrive in exchange for these."""
    return mesh.all_to_all_v(_AXIS, (rows,), sent, received).wait()[0] if mesh.size > 1 else rows


_AXIS = "cp"


@lru_cache(maxsize=32)
def _planned(
    layout: Layout,
    numbers: tuple[int, ...],
    here: int,
    tokens: int,
    width: int,
    documents: tuple[int, ...],
    device: torch.device,
) -> _Plan:
    """numbers: rank -> its number in the layout."""
    size = len(numbers)
    held = [layout.segments(tokens, size, number) for number in numbers]
    found = needs(held, held, Mask.of(True, (width - 1, 0), documents))
    others = [rank for rank in range(size) if rank != here]
    leaving = {rank: found.rows(rank, here) for rank in others}
    arriving = {rank: found.rows(here, rank) for rank in others}
    mine = layout.positions(tokens, size, numbers[here])
    runs = [run for rank in others for run in rows_of(held[rank], arriving[rank])]
    fetched = [torch.arange(run.start, run.stop, run.step) for run in runs]
    place = torch.full((tokens,), len(mine) + sum(map(len, fetched)))  # of every position; by default, the zeros
    known = torch.cat([mine, *fetched])
    place[known] = torch.arange(len(known))
    begins = torch.tensor((0, *documents))
    first = begins[torch.searchsorted(begins, mine, right=True) - 1]  # of each token's document
    before = []
    for back in range(1, width):
        at = mine - back
        before.append(torch.where(at >= first, place[at.clamp(min=0)], len(known)).to(device))
    rows = [torch.arange(r.start, r.stop) for rank in others for r in leaving[rank]]
    return _Plan(
        leaving=torch.cat([mine[:0], *rows]).to(device),
        sent=tuple(sum(map(len, leaving.get(rank, ()))) for rank in range(size)),
        received=tuple(sum(map(len, arriving.get(rank, ()))) for rank in range(size)),
        before=tuple(before),
    )
