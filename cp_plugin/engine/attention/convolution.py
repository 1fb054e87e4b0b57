"""Short causal convolution of a sharded sequence, as in front of delta-rule and state-space layers.

    y[p] = sum_i  weight[:, w - 1 - i] * x[p - i]          i = 0 .. w - 1, within p's document

A rank needs the w - 1 tokens before each run of its own, which is what a sliding window of that width sees
(``engine.core.needs``): one message per neighbour, forward and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.attention import agreement, autocast
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.common.eager import eager
from cp_plugin.engine.common.first_order import first_order
from cp_plugin.engine.core.layout import Layout
from cp_plugin.engine.core.mask import Mask, document_bounds
from cp_plugin.engine.core.needs import needs, rows_of
from cp_plugin.engine.kernels import fused
from cp_plugin.engine.methods.registry import names

type Rows = tuple[Tensor, Tensor, tuple[int, ...]]
"""``[n, b, c]``, their positions, int64 ``[n]``, and how many of them leave for, or arrive from, each rank."""
told: list[tuple[Rows, Rows]] | None = None
"""Gets the rows that left and those that arrived in each pass of the calls that are made meanwhile."""


@eager
@autocast.cast("x", "weight", "bias")
def short_convolution(
    cp: ContextParallel, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, cu_seqlens: Tensor | None = None
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
    with agreement.compare_call(cp, "short_convolution", (x, weight, bias)) as settings:
        if cp.provider.kind != "linear":
            raise ValueError(
                f"provider {cp.provider.name!r} is for softmax attention: short convolutions belong to linear "
                f"attention; use one of {', '.join(names('linear'))}"
            )
        if weight.dim() != 2 or weight.size(0) != x.size(2) or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = [None if y is None else tuple(y.shape) for y in (x, weight, bias)]
            raise ValueError(f"x, weight and bias must be [s, b, c], [c, w] and [c], got {shapes}")
        tokens, width = x.size(0) * cp.size, weight.size(1)
        documents = settings["documents"] = document_bounds(cu_seqlens, tokens)
    plan = _planned(cp.layout, cp.numbers, cp.index, tokens, width, documents, x.device)
    return _Convolution.apply(x, weight, bias, plan, cp.mesh)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Index tables, on the device. n: number of rows of the halo, which other ranks send."""

    leaving: tuple[range, ...]
    """Rows of this rank that others need, by rank."""
    sent: tuple[int, ...]
    received: tuple[int, ...]
    before: Tensor
    """Row of the token i before each of this rank's tokens, from s on in the halo; -1: none. int32 ``[w, s]``."""
    after: Tensor
    """This rank's token i after each row; -1: none. int32 ``[w, s + n]``."""
    home: Tensor
    """Where each token's gradients are among the rows that come back; -1: nowhere. int32 ``[most of any token, s]``."""
    lent: Tensor
    """Positions of the rows that leave, and of the halo: int64."""
    halo: Tensor


@first_order
class _Convolution(torch.autograd.Function):
    """Saves the tokens and their halo; all sums are in the accumulation dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: _Plan, mesh: Mesh) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        with mesh.ledger.phase("forward"):
            leaving = [x[rows.start : rows.stop] for rows in plan.leaving] or [x[:0]]
            rows = leaving[0] if len(leaving) == 1 else torch.cat(leaving)
            halo = _sent(mesh, rows, plan.sent, plan.received)
        ctx.save_for_backward(x, halo, weight, bias)
        ctx.plan, ctx.mesh, ctx.told = plan, mesh, told
        if ctx.told is not None:
            ctx.told.append(((rows, plan.lent, plan.sent), (halo, plan.halo, plan.received)))
        return fused.convolve(x, halo, plan.before, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, halo, weight, bias = ctx.saved_tensors
        plan, mesh, tokens = ctx.plan, ctx.mesh, len(x)
        dout = dout if dout.stride(2) == 1 else dout.contiguous()
        dhalo, of_halo = halo, None
        if len(halo):
            dhalo, of_halo = fused.convolve_back(dout, halo, plan.after[:, tokens:], weight)
        with mesh.ledger.phase("backward"):
            returned = _sent(mesh, dhalo, plan.received, plan.sent)
        if ctx.told is not None:
            ctx.told.append(((dhalo, plan.halo, plan.received), (returned, plan.lent, plan.sent)))
        dx, sums = fused.convolve_back(dout, x, plan.after[:, :tokens], weight, returned, plan.home)
        sums = sums if of_halo is None else sums + of_halo
        dweight = sums[:-1].t().to(weight.dtype, memory_format=torch.contiguous_format)
        return dx, dweight, None if bias is None else sums[-1].to(bias.dtype), None, None


def _sent(mesh: Mesh, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
    """The rows that arrive in exchange for these."""
    return mesh.all_to_all_v(_AXIS, (rows,), sent, received).wait()[0] if mesh.size > 1 else rows


_AXIS = "cp"


@lru_cache(maxsize=32)
def _planned(
    layout: Layout,
    numbers: tuple[int, ...],
    index: int,
    tokens: int,
    width: int,
    documents: tuple[int, ...],
    device: torch.device,
) -> _Plan:
    """numbers: rank -> its number in the layout."""
    size = len(numbers)
    held = [layout.segments(tokens, size, number) for number in numbers]
    needed = needs(held, held, Mask.from_arguments(True, (width - 1, 0), documents))
    others = [rank for rank in range(size) if rank != index]
    leaving = {rank: needed.rows(rank, index) for rank in others}
    arriving = {rank: needed.rows(index, rank) for rank in others}
    own = layout.positions(tokens, size, numbers[index])
    runs = [run for rank in others for run in rows_of(held[rank], arriving[rank])]
    fetched = [torch.arange(run.start, run.stop, run.step) for run in runs]
    known = torch.cat([own, *fetched])
    place = torch.full((tokens,), -1)  # of every position
    place[known] = torch.arange(len(known))
    begins = torch.tensor((0, *documents))
    first = begins[torch.searchsorted(begins, own, right=True) - 1]  # of each token's document
    before, after = torch.full((width, len(own)), -1), torch.full((width, len(known)), -1)
    for back in range(width):
        at = own - back
        before[back] = torch.where(at >= first, place[at.clamp(min=0)], -1)
        seen = before[back] >= 0
        after[back, before[back, seen]] = torch.arange(len(own))[seen]
    rows = tuple(run for rank in others for run in leaving[rank])
    lent = [own[run.start : run.stop] for run in rows] or [own[:0]]
    return _Plan(
        leaving=rows,
        sent=tuple(sum(map(len, leaving.get(rank, ()))) for rank in range(size)),
        received=tuple(sum(map(len, arriving.get(rank, ()))) for rank in range(size)),
        before=copied(before.int(), device),
        after=copied(after.int(), device),
        home=copied(_row_places(rows, len(own)).int(), device),
        lent=copied(torch.cat(lent), device),
        halo=copied(known[len(own) :], device),
    )


def _row_places(runs: tuple[range, ...], tokens: int) -> Tensor:
    """Where each row stands in these runs, one after the other: ``[most of any row, tokens]``, filled up with -1."""
    rows = torch.tensor([row for run in runs for row in run], dtype=torch.int64)
    order = rows.argsort(stable=True)
    counts = rows.bincount(minlength=tokens)
    nth = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows[order]]
    places = torch.full((int(counts.max()), tokens), -1)
    places[nth, rows[order]] = order
    return places


def copied(table: Tensor, device: torch.device) -> Tensor:
    """The same on the device; the host does not wait for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
