"""Programs of stock Megatron's methods, which run in Transformer Engine.

p2p, a2a and a2a+p2p make the moves of ring, Ulysses and USP: theirs are our methods' programs, with the gradients of
keys and values in the model's dtype. Its all-gather is traced here in Transformer Engine's own order
(``AttnFuncWithCPAndKVAllGather`` of 2.20, sequence-first tensors, cuDNN's kernels), which is not ours:

    forward    gather k, wait, gather v, wait; k and v into sequence order, a pass over the whole sequence each
               attention of the rank's two chunks on two streams, each over a slice of the gathered keys
               each chunk's output is copied to its place
    backward   dk, dv of the whole sequence zeroed; k and v gathered and reordered again, as above
               attention of the two chunks, which for grouped queries writes dk and dv of every query head and adds them
               up (cuDNN's graph); each chunk's dq copied, its slices of dk and dv added to the whole
               dk and dv into the ranks' order, a pass each; scatter dk, wait, scatter dv, wait

A window shortens the slices, never the gathers, the reorderings and the scatters. Packed documents (``thd``) take no
slices: both chunks' dk and dv are as long as the pack, and each call first zeroes whatever it will write. Kernels run
in order, as everywhere in the planner. Their rates were measured with as many keys as queries, so sums over query heads
are counted for the keys beyond. Assumed in stock's favour: the chunks' kernels, on two streams, fill the device as one
would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.comm import Pending
from cp_plugin.engine.comm.mesh import Over
from cp_plugin.engine.common.without_data import empty
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import tiles
from cp_plugin.engine.kernels.blocks import results
from cp_plugin.planner.machine.events import Attention, Direction, Event, Memory, Post, Shape
from cp_plugin.planner.trace.program import Program, Seen, join_tiles, program, traced

_AXIS = "cp"


def stock_program(setup: Setup, index: int, *, tiled: bool = False) -> Program:
    """Trace one rank of stock Megatron's method that moves what the setup's provider does; ValueError for a setup that
    cannot run, with its reason.

    tiled: as for ``program``.
    """
    if setup.provider.name == "all_gather" and setup.problem.size > 1:
        return _gathered(setup, index)
    return _as_sent(program(setup, index, tiled=tiled))


def _gathered(setup: Setup, index: int) -> Program:
    problem = setup.problem
    shapes = calls.shapes(problem, problem.seq_length // problem.size)
    q, k, v, dout = (x.new_empty(x.shape) for x in (shapes.q, shapes.k, shapes.v, shapes.dout))
    with traced(setup, index) as seen:
        call = _AllGather(seen, problem, index)
        out, lses = call.forward(q, k, v)
        seen.end_forward()
        with seen.cp.mesh.ledger.phase("backward"):
            call.backward(dout, q, k, v, out, lses)
        return seen.program()


class _Chunk(NamedTuple):
    """One of a rank's two chunks of every document, and the slice of the keys that its kernel is given."""

    rows: Segments
    keys: range
    seen: int
    """Keys that it computes with: up to the last that its queries may see."""


class _AllGather:
    """One call, on tensors without data: ``q`` is ``[s, b, h, d]``, ``k`` and ``v`` have the key/value heads."""

    def __init__(self, seen: Seen, problem: Problem, index: int) -> None:
        self._mesh, self._events = seen.cp.mesh, seen.events
        self._problem, self._mask = problem, problem.mask()
        self._chunks = [self._chunk(n) for n in (index, 2 * problem.size - 1 - index)]
        self._order = torch.empty(2 * problem.size, dtype=torch.int32, device="meta")

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
        """out ``[s, b, h, e]`` and the chunks' lse."""
        keys, values = (self._reorder(x) for x in self._gather(k, v))
        out = results(q, v)[0]
        self._zeros(out.shape)  # whatever the layout, though only packed documents need it
        each = [results(self._part(q), values) for _ in self._chunks]
        for part, _ in each:
            self._zeroed(part)
        self._attend("forward", q)
        for part, _ in each:
            self._copied(part)
        del keys, values
        return out, [lse for _, lse in each]

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lses: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of the rank's tokens, in the model's dtype."""
        size = self._problem.size
        dq = torch.empty_like(q)
        self._zeroed(dq)
        dk, dv = (self._zeros((size * x.size(0), *x.shape[1:])) for x in (k, v))
        keys, values = (self._reorder(x) for x in self._gather(k, v))
        self._pass(dout, out, *lses)  # delta
        each = [
            (torch.empty_like(self._part(q)), *(torch.empty_like(self._slice(x, chunk)) for x in (keys, values)))
            for chunk in self._chunks
        ]
        for parts in each:
            self._zeroed(*parts)
        self._attend("backward", q)
        for chunk, (dq_part, *sums_of_chunk) in zip(self._chunks, each, strict=True):
            self._added_up(chunk, q)
            self._copied(dq_part)
            for whole, part in zip((dk, dv), sums_of_chunk, strict=True):
                self._slice(whole, chunk).add_(part)
        del each, parts, sums_of_chunk, part, keys, values
        dk, dv = self._reorder(dk), self._reorder(dv)
        sums = _Narrow(self._mesh)
        return dq, *(sums.reduce_scatter(_AXIS, (x,)).wait()[0] for x in (dk, dv))

    def _chunk(self, number: int) -> _Chunk:
        """The chunk of that number, of twice as many as ranks."""
        p = self._problem
        ends = p.bounds or (0, p.seq_length)
        each = [(start, (end - start) // (2 * p.size)) for start, end in pairwise(ends)]
        rows = tuple(range(start + number * n, start + (number + 1) * n) for start, n in each)
        if p.bounds:
            return _Chunk(rows, range(p.seq_length), sum(map(len, rows)) * (number + 1))
        left, right = self._mask.left, self._mask.right
        first = 0 if left is None else max(0, rows[0].start - left)
        end = p.seq_length if right is None else min(p.seq_length, rows[0].stop + right)
        return _Chunk(rows, range(first, end), end - first)

    def _gather(self, *tensors: Tensor) -> list[Tensor]:
        """One after the other: each has arrived before the next is sent."""
        return [self._mesh.all_gather(_AXIS, (x,)).wait()[0] for x in tensors]

    def _reorder(self, x: Tensor) -> Tensor:
        """Chunks of all ranks from the ranks' order into the sequence's, or back: a pass over all of them."""
        return x.unflatten(0, (2 * self._problem.size, -1)).index_select(0, self._order).flatten(0, 1)

    def _part(self, x: Tensor) -> Tensor:
        """A kernel's rows: those of one chunk; of packed documents all, of which it computes a chunk's."""
        return x if self._problem.bounds else x[: x.size(0) // 2]

    def _slice(self, x: Tensor, chunk: _Chunk) -> Tensor:
        return x[chunk.keys.start : chunk.keys.stop]

    def _attend(self, direction: Direction, q: Tensor) -> None:
        """Both chunks' kernels, on two streams."""
        p = self._problem
        seen = (t for chunk in self._chunks for t in tiles(chunk.rows, (chunk.keys,), self._mask))
        shapes = tuple(Shape(len(t.q), len(t.k), t.diagonal) for t in seen)
        heads, kind = q.size(1) * q.size(2), dtype_name(q.dtype)
        self._events.append(Attention(direction, shapes, q.size(0), heads, p.head_dim, p.v_head_dim, kind))

    def _added_up(self, chunk: _Chunk, q: Tensor) -> None:
        """dk and dv of all query heads are written, read, and added up to those of the key/value heads."""
        p = self._problem
        if p.heads > p.kv_heads:
            beyond = max(0, chunk.seen - sum(map(len, chunk.rows)))
            elements = beyond * q.size(1) * p.heads * (p.head_dim + p.v_head_dim)
            self._events.append(Memory(2 * elements * q.element_size(), 2))

    def _copied(self, part: Tensor) -> None:
        """A chunk's result is copied to its place in the whole: half a rank's rows, of packed documents too."""
        self._pass(part, part, share=2 if self._problem.bounds else 1)

    def _zeroed(self, *tensors: Tensor) -> None:
        """Zero results before a kernel writes those of packed documents: it leaves padding out."""
        if self._problem.bounds:
            for x in tensors:
                self._pass(x)

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        zeros = empty(shape, self._problem.dtype)
        self._pass(zeros)
        return zeros

    def _pass(self, *tensors: Tensor, share: int = 1) -> None:
        self._events.append(Memory(sum(x.numel() * x.element_size() for x in tensors) // share, 1))


class _Narrow(Over):
    """A mesh on which sums travel and arrive in the dtype in which they are given."""

    def reduce_scatter(self, axis: str, tensors: Sequence[Tensor]) -> Pending:
        return self._sum_and_scatter(axis, tensors)


def _as_sent(ours: Program) -> Program:
    """A program with dk and dv in the dtype of k and v, as Transformer Engine sends them, whose kernels take any tiles
    of a mask in one call.

    Ours are float32: twice the bytes of the keys and values sent before them. The ledger stays that of ours.
    """
    exchanged = [e.nbytes for e in ours.backward if isinstance(e, Post) and e.verb == "exchange"]
    least_exchanged = min(exchanged, default=0)

    def narrowed(event: Event) -> Event:
        if not isinstance(event, Post) or event.verb == "all_to_all":
            return event
        wide = event.verb == "reduce_scatter" or (event.verb == "exchange" and event.nbytes > least_exchanged)
        return event._replace(nbytes=event.nbytes // 2) if wide else event

    return join_tiles(replace(ours, backward=tuple(map(narrowed, ours.backward))))
