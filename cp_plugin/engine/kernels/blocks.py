"""Attention of a block: queries and keys at known positions, under a mask.

library kernels   support full and causal tiles: the block is cut into these and the results merged (``Tiled``)
own kernels       take positions and mask directly, in one launch, a tree in one per depth (``Whole``)
auto on CUDA      a library for one tile or a few large ones, otherwise our kernels (``Either``)
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core.block import Block
from cp_plugin.engine.core.dtypes import accumulation_dtype
from cp_plugin.engine.core.layout import KEPT_BYTES, Segments, join_adjacent, sort_positions, take
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import CallInfo, Problem
from cp_plugin.engine.core.scaling import Scaling
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.core.tiles import Tile, may_meet, square_tiles, tiles
from cp_plugin.engine.core.values import NO_SUMS, Gradients, KeyValues, Partial, Queries, Shard, Sums
from cp_plugin.engine.kernels import backends, fused
from cp_plugin.engine.kernels.backends import AnyBackend, Backend, BlockBackend, BlockKernel
from cp_plugin.engine.kernels.cost import Sizes, Speeds, cost, speeds
from cp_plugin.engine.kernels.merge import accumulator, add, add_rows, add_sums, merge, merge_rows


class Chosen(NamedTuple):
    """The chosen kernel and the reason."""

    kernel: BlockKernel
    backends: tuple[str, ...]
    """Its name; a second one takes the blocks of many or small tiles."""
    why: str

    @property
    def name(self) -> str:
        return ", and ".join(
            (*self.backends[:1], *(f"{own} where a block has many or small tiles" for own in self.backends[1:]))
        )


class Planned:
    """The problems for which ``auto`` takes a library that builds plans: the first few of tensors of the same heads.

    cuDNN builds a plan for each tile shape, in each thread, and never frees it; where lengths vary, that would be in
    every step. The answer for a problem never changes, and is the same on ranks that make the same calls.
    """

    MOST = 8

    def __init__(self) -> None:
        self._first: dict[Hashable, set[Problem]] = defaultdict(set)

    def __contains__(self, problem: Problem) -> bool:
        p = problem
        first = self._first[p.heads, p.kv_heads, p.head_dim, p.v_head_dim, p.dtype]
        if len(first) < self.MOST:
            first.add(problem)
        return problem in first


def choose(
    options: Options, problem: Problem, device: torch.device, scaling: Scaling | None = None, *, plans: bool = True
) -> Chosen:
    """The kernel for such a problem; ValueError if the requested kernel cannot run it, with the reason and an
    alternative.

    Args:
        scaling: scales of an FP8 kernel; None: current scaling.
        plans: False: ``auto`` takes no library that builds a plan per shape, as for packed documents.
    """
    call = CallInfo.from_problem(problem, device)
    auto = options.backend == "auto"
    if options.fp8 == "compute" and auto:
        auto, backend, why = False, backends.get(backends.fp8_kernels()[0]), spelled("fp8", "compute")
        reason = backends.refusal(backend, call)
        if reason is not None:
            raise ValueError(
                f"{spelled('fp8', 'compute')} cannot run here: {reason}; use {spelled('fp8', 'comm')}, which sends in "
                f"FP8 and computes in {str(problem.dtype).removeprefix('torch.')}, or "
                f"{spelled('backend', backends.fp8_kernels()[1])}, a reference with the same numerics"
            )
    else:
        backend, why = backends.choose(options.backend, call, plans=plans and not problem.documents)
    if scaling is not None and backends.Traits.from_backend(backend).in_fp8:
        backend = replace(backend, scaling=scaling)  # type: ignore[type-var]
    block_kernel = kernel(backend, problem, device, auto=auto)
    second = (backends.OURS,) if isinstance(block_kernel, Either) else ()
    return Chosen(block_kernel, (backend.name, *second), why)


def kernel(backend: AnyBackend, problem: Problem, device: torch.device, *, auto: bool) -> BlockKernel:
    """The block kernel of a backend; with ``auto`` on CUDA also our own beside it."""
    if not isinstance(backend, Backend):
        return InOrder(Whole(backend), enough=LONG)
    library = Tiled(backend)
    own = backends.get(backends.OURS)
    if auto and device.type == "cuda" and backends.refusal(own, CallInfo.from_problem(problem, device)) is None:
        return Either(library, InOrder(Whole(own), enough=LONG), speeds(backend, device))
    return InOrder(library)


LONG = 1024
"""Run length from which run boundaries cost our kernels less than sorting the tokens."""


@dataclass(frozen=True, slots=True)
class InOrder:
    """Sorts tokens into the fewest runs, and restores the storage order of the results."""

    inner: BlockKernel
    enough: int | None = None
    """Runs of at least this length stay as they are."""

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None:
        rows, keys, block = self._order(block, queries.q.device)
        queries, kv = rows.sort(queries), keys.sort(kv)
        if rows.order is None:
            return self.inner.forward(queries, kv, block, onto)
        part = self.inner.forward(queries, kv, block)
        return onto if part is None else merge(onto, Partial(*rows.store(*part)))

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None:
        rows, keys, block = self._order(block, queries.q.device)
        queries, kv = rows.sort(queries), keys.sort(kv)
        if rows.order is None and keys.order is None:
            return self.inner.backward(queries, kv, block, onto)
        grads = self.inner.backward(queries, kv, block)
        if grads is None:
            return None
        return add_sums(onto, Gradients(*rows.store(grads.dq), *keys.store(grads.dk, grads.dv)))

    def _order(self, block: Block, device: torch.device) -> tuple[Sorted, Sorted, Block]:
        """Return how rows and keys are sorted, and the block of what results."""

        def order(segments: Segments) -> Sorted:
            if block.mask.full or (self.enough is not None and min(map(len, segments)) >= self.enough):
                return Sorted(segments, None)
            return Sorted(*sort_positions(segments, device))

        rows, keys = order(block.rows), order(block.keys)
        return rows, keys, block._replace(rows=rows.segments, keys=keys.segments)


class Sorted(NamedTuple):
    """Sorted positions and the permutation."""

    segments: Segments
    order: Tensor | None
    """``sorted[i] = stored[order[i]]``; None: unchanged."""

    def sort[S: Shard](self, shard: S) -> S:
        if self.order is None:
            return shard
        return type(shard)(*fused.gather_rows(shard.tensors, self.order), owners=shard.owners)

    def store(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors if self.order is None else fused.scatter_rows(tensors, self.order)


class RowTerms:
    """Caches the row term of the last query block, which a ring uses in every step, while its ``dout`` is alive."""

    def __init__(self) -> None:
        self._terms = WeakTensorKeyDictionary()

    def get(self, dout: Tensor, delta: Tensor, backend: Backend) -> Tensor:
        """``backend.row_term(dout, delta)``, computed once per version of these tensors."""
        kept, versions = self._terms.get(dout), (dout._version, delta._version)
        if kept is None or kept[0]() is not delta or kept[1] != versions:
            kept = weakref.ref(delta), versions, backend.row_term(dout, delta)
            self._terms = WeakTensorKeyDictionary({dout: kept})
        return kept[2]


@dataclass(frozen=True, slots=True)
class Tiled:
    """Block attention by a tile kernel."""

    backend: Backend
    row_terms: RowTerms = field(default_factory=RowTerms, compare=False)

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None:
        q, k, v = queries.q, kv.k, kv.v
        for tile in self.tiles(block):
            q_t, k_t, v_t = take(q, tile.q), take(k, tile.k), take(v, tile.k)
            out, lse = self.backend.forward(q_t, k_t, v_t, tile.diagonal, block.scores)
            onto = merge_rows(onto, tile.q, Partial(out, lse), q)
        return onto

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None:
        block_tiles = self.tiles(block)
        if not block_tiles:
            return None
        (q, dout, lse, delta), (k, v) = queries.tensors, kv.tensors
        row_term = self.row_terms.get(dout, delta, self.backend)
        dq, dk, dv = onto
        for tile in block_tiles:
            dout_t, q_t, lse_t, row_term_t = (take(x, tile.q) for x in (dout, q, lse, row_term))
            k_t, v_t = take(k, tile.k), take(v, tile.k)
            grads = self.backend.backward(dout_t, q_t, k_t, v_t, lse_t, row_term_t, tile.diagonal, block.scores)
            dq = add_rows(dq, tile.q, grads[0], q)
            dk = add_rows(dk, tile.k, grads[1], k)
            dv = add_rows(dv, tile.k, grads[2], v)
        assert dq is not None and dk is not None and dv is not None
        return Gradients(dq, dk, dv)

    def tiles(self, block: Block) -> tuple[Tile, ...]:
        """The kernel calls that a block needs."""
        return tiles(*block.area) if self.backend.any_diagonal else square_tiles(*block.area)


class Level(NamedTuple):
    """Keys at one depth of a tree, and the packed documents formed by their subtrees."""

    place: slice
    """Their range among the keys sorted by depth."""
    keys: Segments
    mask: Mask


@dataclass(frozen=True, slots=True)
class Whole:
    """Block attention by a block backend: in one call, or for a tree one per depth, with subtrees as documents."""

    backend: BlockBackend

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None:
        if not may_meet(*block.area):
            return onto
        if not block.mask.stops:
            running = None if onto is None else Partial(accumulator(onto.out), onto.lse)
            return self.backend.forward(queries, kv, block, running)
        for level_kv, level in _levels(kv, block)[1]:
            onto = self.forward(queries, level_kv, level, onto)
        return onto

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None:
        if not may_meet(*block.area):
            return None
        if not block.mask.stops:
            return self.backend.backward(queries, kv, block, onto)
        by_depth, levels = _levels(kv, block)
        dq, dkv, met = onto.dq, [], False
        for level_kv, level in levels:
            grads = self.backward(queries, level_kv, level, Sums(dq=dq))
            if grads is not None:
                dq, met = grads.dq, True
            dkv.append(tuple(map(torch.zeros_like, level_kv.tensors)) if grads is None else grads[1:])
        if dq is None or not met:
            return None
        dk, dv = by_depth.store(*(torch.cat(parts) for parts in zip(*dkv, strict=True)))
        return Gradients(dq, add(onto.dk, dk), add(onto.dv, dv))


def _levels(kv: KeyValues, block: Block) -> tuple[Sorted, list[tuple[KeyValues, Block]]]:
    """The order of keys by depth in a tree, and the keys and the block of each depth that occurs."""
    key = block.keys, block.mask, kv.k.device
    order, levels = _depths.get(key, lambda: _sort_by_depth(*key))
    by_depth = Sorted(block.keys, order)
    k, v = by_depth.sort(kv).tensors
    return by_depth, [
        (KeyValues(k[place], v[place], owners=kv.owners), block._replace(keys=keys, mask=mask))
        for place, keys, mask in levels
    ]


def _sort_by_depth(keys: Segments, mask: Mask, device: torch.device) -> tuple[Tensor | None, tuple[Level, ...]]:
    """The permutation of keys by depth, as for ``Sorted``, and the levels that occur."""
    held: dict[int, list[tuple[Tensor, range]]] = defaultdict(list)  # rows and positions at each depth
    levels = mask.levels()
    depth_of = {number: depth for depth, (numbers, _) in enumerate(levels) for number in numbers}
    offset = 0
    for segment in keys:
        for number, piece in mask.pieces(segment):
            rows = torch.arange(offset + piece.start, offset + piece.stop)
            held[depth_of[number]].append((rows, segment[piece.start : piece.stop]))
        offset += len(segment)
    order, occurring, begin = list[Tensor](), list[Level](), 0
    for depth in sorted(held):
        of_rows, positions = zip(*held[depth], strict=True)
        order += of_rows
        end = begin + sum(map(len, positions))
        occurring.append(Level(slice(begin, end), join_adjacent(positions), levels[depth][1]))
        begin = end
    return (torch.cat(order).to(device) if len(occurring) > 1 else None), tuple(occurring)


def _nbytes(depths: tuple[Tensor | None, tuple[Level, ...]]) -> int:
    order, levels = depths
    return 64 * sum(len(level.keys) for level in levels) + (0 if order is None else order.nbytes)


_depths: Recent[tuple[Segments, Mask, torch.device], tuple[Tensor | None, tuple[Level, ...]]] = Recent(
    KEPT_BYTES, _nbytes
)


@dataclass(frozen=True, slots=True)
class Either:
    """A library kernel for a single tile or where tiles are estimated cheaper, otherwise our own."""

    library: Tiled
    own: InOrder
    speeds: Speeds | None = None
    """For the estimate; None: blocks of several tiles go to our own kernel."""

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None:
        return self._choose(queries, kv, block).forward(queries, kv, block, onto)

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None:
        return self._choose(queries, kv, block).backward(queries, kv, block, onto)

    def _choose(self, queries: Queries, kv: KeyValues, block: Block) -> InOrder:
        sizes = Sizes.from_tensors(queries.q, kv.k, kv.v)
        estimate = cost(*block.area, sizes, self.speeds, self.own.enough or 0)
        return InOrder(self.library) if estimate.prefers_library else self.own


@dataclass(frozen=True, slots=True)
class RecordingKernel:
    """A ``BlockKernel`` without attention; results are uninitialised.

    Runs a method on meta tensors and a mesh without peers: ``engine.attention.calls.without_peers``.
    """

    record: Callable[[Queries, KeyValues, Block], object] = lambda queries, kv, block: None
    """Called in both directions; in the backward pass queries carry a dout."""

    def forward(self, queries: Queries, kv: KeyValues, block: Block, onto: Partial | None = None) -> Partial | None:
        self.record(queries, kv, block)
        if not may_meet(*block.area):
            return onto
        return Partial(accumulator(onto.out), onto.lse) if onto is not None else Partial(*results(queries.q, kv.v))

    def backward(self, queries: Queries, kv: KeyValues, block: Block, onto: Sums = NO_SUMS) -> Gradients | None:
        self.record(queries, kv, block)
        if not may_meet(*block.area):
            return None
        return add_sums(onto, Gradients(*map(torch.empty_like, (queries.q, *kv.tensors))))


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised kernel results: out ``[s, b, h, e]`` and lse ``[s, b, h]``."""
    lse = q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))
    return q.new_empty((*q.shape[:3], v.size(3))), lse
