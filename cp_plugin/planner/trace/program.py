"""Program of a rank: the kernels, memory passes and messages of one attention call, in order.

Nothing is modelled: the method itself runs through autograd, on tensors without data, with recording stand-ins for the
kernels and the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.comm import WHOLE, Mesh, Pending, TraceMesh, flat_index, sums
from cp_plugin.engine.comm.mesh import Tensors, nbytes_of
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.dtypes import accumulation_dtype, dtype_name
from cp_plugin.engine.core.layout import Segments, sort_positions
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import Tile, may_meet, tiles
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels import blocks
from cp_plugin.engine.kernels.backends import BlockKernel
from cp_plugin.engine.kernels.blocks import RecordingKernel, results
from cp_plugin.engine.kernels.fused import observed
from cp_plugin.engine.linear import kernels
from cp_plugin.engine.linear.tokens import CHUNK, Tokens
from cp_plugin.engine.methods.protocol import Formula, Parts, Scan
from cp_plugin.planner.machine.events import Attention, Auto, Direction, Event, Memory, Post, Products, Shape, Wait
from cp_plugin.planner.trace.memory import Meter, Passes, Peaks
from cp_plugin.testing.traffic import read_ledger

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    sent: Formula
    """The ledger of the run."""
    peaks: Peaks

    def pairs(self) -> int:
        """Visible (query, key) pairs of the forward pass, over heads and batch."""
        kernels = (e for e in self.forward if isinstance(e, Attention))
        return sum(Tile(range(s.rows), range(s.keys), s.diagonal).pairs * e.heads for e in kernels for s in e.shapes)


def join_tiles(one: Program) -> Program:
    """The same where one call of a library takes any tiles of a mask, as in other implementations."""
    forward, backward = (
        tuple(e._replace(auto=None) if isinstance(e, Attention) else e for e in each)
        for each in (one.forward, one.backward)
    )
    return replace(one, forward=forward, backward=backward)


def program(setup: Setup, index: int, *, tiled: bool = False) -> Program:
    """Trace one rank; ValueError for a setup that cannot run, with its reason.

    tiled: launch a library kernel per tile, as on the CPU; otherwise as ``auto`` does on CUDA.
    """
    problem = setup.problem
    shapes = calls.shapes(problem, problem.seq_length // problem.size)
    inputs = calls.Inputs(*(None if y is None else y.new_empty(y.shape).requires_grad_() for y in shapes))
    with traced(setup, index, tiled=tiled) as seen:
        calls.call_through_autograd(seen.cp, inputs, problem, seen.end_forward)
        return seen.program()


@dataclass(slots=True)
class Seen:
    """A rank being traced."""

    cp: ContextParallel
    """The public API around recording kernels and a recording mesh."""
    events: list[Event]
    meter: Meter
    forward: tuple[int, int] = (0, 0)
    """Events of the forward pass, and its peak memory."""

    def end_forward(self) -> None:
        """Begin the backward pass."""
        self.forward = len(self.events), self.meter.peak
        self.meter.peak = self.meter.live

    def program(self) -> Program:
        events, peak = self.forward
        return Program(
            forward=tuple(self.events[:events]),
            backward=tuple(self.events[events:]),
            sent=read_ledger(self.cp.mesh),
            peaks=Peaks(peak, self.meter.peak),
        )


@contextmanager
def traced(setup: Setup, index: int, *, tiled: bool = False) -> Iterator[Seen]:
    """Record what is done with meta tensors through ``Seen.cp``; ValueError for a setup that cannot run.

    tiled: as for ``program``.
    """
    if setup.reason is not None:
        raise ValueError(f"provider {setup.provider.name!r} cannot do this: {setup.reason}")
    events: list[Event] = []
    meter = Meter()
    passes = Passes(
        lambda nbytes, launches: _add_memory(events, nbytes, launches),
        lambda flops, dtype: events.append(Products(flops, 1, dtype)),
        meter,
    )
    cp = _Traced(events, tiled, setup, _Recorded(setup, index, events, passes))
    with passes, observed(passes.one_pass if not tiled else None):
        yield Seen(cp, events, meter)


class _Traced(ContextParallel):
    """``ContextParallel`` around recording kernels."""

    def __init__(self, events: list[Event], tiled: bool, setup: Setup, mesh: Mesh) -> None:
        super().__init__(setup, mesh=mesh)
        self._events, self._tiled = events, tiled

    def kernel(self, problem: Problem, *_: Any, **__: Any) -> BlockKernel:
        planned = _Planned(self._events, problem)
        library = blocks.Tiled(planned)
        own = blocks.InOrder(RecordingKernel(planned.add_block), enough=blocks.LONG)
        return blocks.InOrder(library) if self._tiled else blocks.Either(library, own)

    def scan(self, problem: Problem, device: torch.device) -> tuple[Scan, Parts]:
        segments = [self.layout.segments(problem.seq_length, self.size, number) for number in self.numbers]
        parts = Parts.from_segments(problem, segments, _linear_kernel(self._events, problem))
        return self.provider.build(self.mesh, parts, problem, self.options), parts


class _Recorded(TraceMesh):
    """A mesh without peers that records posts and waits."""

    def __init__(self, setup: Setup, index: int, events: list[Event], passes: Passes) -> None:
        """passes: must not count the allocation of receive buffers."""
        super().__init__(setup.axes, index)
        self._events, self._posted, self._groups = events, 0, setup.provider.extra_groups
        self._parts: tuple[tuple[int, int], ...] = ()  # of the message that is being posted
        self._streams = {sums(axis): axis for axis in self.axes}
        self._passes = passes

    def _group_name(self, axis: str, group: str) -> str:
        return group if group in self._groups else axis

    def _deliver(
        self, verb: str, axis: str, tensors: Sequence[Tensor], post: Callable[..., Pending], *ends: int | None
    ) -> Pending:
        result = super()._deliver(verb, axis, tensors, post, *ends)
        stream, axis = axis, self._streams.get(axis, axis)
        nbytes, to, source = nbytes_of(tensors), None, None
        if verb in ("exchange", "send", "receive"):
            verb, (to, source) = "exchange", (self._flat(axis, rank) for rank in ends)
        elif verb != "all_to_all_v":
            n = self.axes[axis]
            nbytes = (n - 1) * nbytes // (1 if verb == "all_gather" else n)
        number, parts = self._posted, self._parts
        self._posted, self._parts = number + 1, ()
        self._events.append(Post(number, verb, axis, stream, nbytes, len(tensors), to, source, parts))

        def wait() -> Tensors:
            self._events.append(Wait(number))
            with self._passes.unseen():
                return result.wait()

        return Pending(wait)

    def _flat(self, axis: str, rank: int | None) -> int | None:
        """Rank in the whole mesh of a rank of the axis."""
        if rank is None or axis == WHOLE:
            return rank
        return flat_index(self.axes, {**self.coordinates, axis: rank})

    def _all_to_all_v(self, axis: str, tensors: Tensors, sent: Sequence[int], received: Sequence[int]) -> Pending:
        of_row = sum(prod(t.shape[1:]) * t.element_size() for t in tensors)
        self._parts = tuple((leaving * of_row, coming * of_row) for leaving, coming in zip(sent, received, strict=True))
        return super()._all_to_all_v(axis, tensors, sent, received)


class _Planned:
    """A ``Backend`` that only records launches, of blocks as well."""

    name, any_diagonal = "planned", False

    def __init__(self, events: list[Event], problem: Problem) -> None:
        self._events, self._problem = events, problem

    def _launch(self, direction: Direction, shapes: tuple[Shape, ...], q: Tensor, auto: Auto | None = None) -> None:
        p, heads, kind = self._problem, q.size(1) * q.size(2), dtype_name(q.dtype)
        self._events.append(Attention(direction, shapes, q.size(0), heads, p.head_dim, p.v_head_dim, kind, auto))

    def add_block(self, queries: Queries, kv: KeyValues, block: Block) -> None:
        """Record the launch of our kernel for a block, unless it is empty."""
        if not may_meet(*block.area):
            return
        (rows, keys, mask), q, k = block.area, queries.q, kv.k
        (in_order, q_order), (k_in_order, k_order) = (sort_positions(side, _CPU) for side in (rows, keys))
        unsorted = tuple(0 if order is None else x.size(0) for x, order in ((q, q_order), (k, k_order)))
        auto = Auto(_shapes(in_order, k_in_order, mask), k.size(0), k.size(1) * k.size(2), *unsorted)
        self._launch("forward" if queries.dout is None else "backward", _shapes(rows, keys, mask), q, auto)

    def unsupported(self, *_: Any) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, diagonal: int, scores: Scores) -> tuple[Tensor, Tensor]:
        self._launch("forward", (Shape(q.size(0), k.size(0), diagonal),), q)
        return results(q, v)

    def row_term(self, dout: Tensor, delta: Tensor) -> Tensor:
        return delta

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, term: Tensor, diagonal: int, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._launch("backward", (Shape(q.size(0), k.size(0), diagonal),), q)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _linear_kernel(events: list[Event], problem: Problem) -> kernels.Kernel:
    """Chunked linear attention within segments: per token the products with a state, and those within a chunk."""

    def multiply(x: Tokens, times: int) -> None:
        t, b, h, d = x.q.shape
        e = x.v.size(3)
        chunk = min(t, CHUNK)
        flops = times * t * b * h * (4 * d * e + chunk * (d + e))
        events.append(Products(flops, times, dtype_name(x.q.dtype)))

    def forward(x: Tokens) -> Tensor:
        multiply(x, 1)
        return x.q.new_empty((*x.q.shape[:3], x.v.size(3)), dtype=accumulation_dtype(x.q.dtype))

    def backward(dout: Tensor, x: Tokens) -> tuple[Tensor, ...]:
        multiply(x, 3)  # the forward pass again, and twice as much
        return tuple(torch.empty_like(y) for y in x.differentiable)

    return kernels.Kernel("planned", forward, backward)


def _shapes(rows: Segments, keys: Segments, mask: Mask) -> tuple[Shape, ...]:
    return tuple(Shape(len(t.q), len(t.k), t.diagonal) for t in tiles(rows, keys, mask))


def _add_memory(events: list[Event], nbytes: int, launches: int) -> None:
    """Merges consecutive passes into one event."""
    last = events[-1] if events else None
    if isinstance(last, Memory):
        events[-1] = Memory(last.nbytes + nbytes, last.launches + launches)
    else:
        events.append(Memory(nbytes, launches))
