"""What a block costs in tiles, by a library's kernel, and in one launch of ours: the cheaper one gets it.

    a library's    faster products; each tile takes launches of its own, and its results are merged
    ours           slower products, seven of them in a backward and not five; nothing to merge, whatever the mask

Seconds of a forward and a backward together, estimated from the speeds in ``kernels.backends.devices``. They tell
which is less, and predict nothing else. Pure Python on shapes: no tensor is looked at, and answers are kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.core.layout import Segments, sort_positions
from cp_plugin.core.mask import Mask
from cp_plugin.core.tiles import Tile, tiles_up_to
from cp_plugin.kernels.backends import AnyBackend, devices
from cp_plugin.kernels.backends.devices import Family, Rate

MOST = 256
"""Tiles that are counted; a block of more is ours."""
_BLOCK = 128
"""Queries and keys that kernels compute whole, about."""
_LAUNCHES, _OWN_LAUNCHES = 10, 3
"""Of a tile: its kernel, the sign of its log-sum-exp, merging; three kernels, the log-sum-exp made dense, three sums.
Of our kernels: one forward, two backward."""
_SUMS = 8
"""Bytes of an element of a running sum in float32: read and written."""
_CPU = torch.device("cpu")


class Sizes(NamedTuple):
    """Of a block's tensors, besides their tokens."""

    heads: int
    """Query heads, times the batch."""
    kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        """Those of ``[s, b, h, d]``, ``[s, b, g, d]`` and ``[s, b, g, e]``."""
        return cls(q.size(1) * q.size(2), q.size(1) * k.size(2), q.size(3), v.size(3), q.element_size())


class Speeds(NamedTuple):
    """Of a library's kernel and ours on one GPU."""

    library: Rate
    own: Rate
    processors: int
    bytes_per_s: float
    plans: bool
    """Whether the library's kernel builds a plan for every new shape of a tile."""


class Cost(NamedTuple):
    """Of a block, for each of the two."""

    tiles: int | None
    """Calls of the library's kernel in one direction; None: not counted."""
    library_s: float
    own_s: float
    why: str
    """The reason for what gets it."""

    @property
    def by_library(self) -> bool:
        """Whether the library's kernel gets it."""
        return self.library_s <= self.own_s


def speeds(backend: AnyBackend, device: torch.device) -> Speeds | None:
    """Those of a backend that ``auto`` chose, beside ours; None where no figure is known."""
    return speeds_on(devices.find(device), backend.name, getattr(backend, "generation", None))


def speeds_on(family: Family, backend: str, generation: int | None = None) -> Speeds | None:
    """The same on GPUs of a family."""
    line, scale = family.candidate(backend, generation), family.scale
    if line is None or line.rate is None or scale is None:
        return None
    plans = backend in devices.PLANS_EACH_SHAPE
    return Speeds(line.rate, scale.own, scale.processors, scale.bytes_per_s, plans)


@lru_cache(maxsize=1024)
def cost(rows: Segments, keys: Segments, mask: Mask, sizes: Sizes, at: Speeds | None, enough: int = 0) -> Cost:
    """Of a block of these positions.

    Args:
        at: None: a block is the library's if it is one tile.
        enough: tokens of a run from which on our kernels take tokens as they are stored.
    """
    if mask.packed and (at is None or at.plans):
        return Cost(None, 1.0, 0.0, "packed documents: the library would build plans for their shapes")
    if mask.windowed and at is None:
        return Cost(None, 1.0, 0.0, "a sliding window")
    (q_runs, q_order), (k_runs, k_order) = sort_positions(rows, _CPU), sort_positions(keys, _CPU)
    found = tiles_up_to(MOST, q_runs, k_runs, mask)
    if found is None:
        return Cost(None, 1.0, 0.0, f"more than {MOST} tiles")
    parts = [part for tile in found for part in tile.cut()]
    if len(parts) <= 1:
        return Cost(len(parts), 0.0, 1.0, "one tile")
    if at is None:
        return Cost(len(parts), 1.0, 0.0, "several tiles")
    sides = ((rows, q_order), (keys, k_order))
    q_side, k_side = (side if order is not None else () for side, order in sides)
    library = sum(_tile(part, sizes, at) for part in parts) + _ordering(q_side, k_side, sizes, at)
    q_side, k_side = (side if side and min(map(len, side)) < enough else () for side in (q_side, k_side))
    own = _own(found, sum(map(len, rows)), sum(map(len, keys)), sizes, at) + _ordering(q_side, k_side, sizes, at)
    return Cost(len(parts), library, own, f"{library * 1e3:.3g} ms in tiles, {own * 1e3:.3g} ms in one launch")


def _tile(tile: Tile, sizes: Sizes, at: Speeds) -> float:
    rows, keys = len(tile.q), len(tile.k)
    products = _products(_whole_blocks(tile), rows, keys, sizes, at.library, at.processors)
    nbytes = _elements(rows, keys, sizes) * (sizes.itemsize + _SUMS)
    if tile.q.step < 0:  # what goes in and comes out is copied from the last to the first
        nbytes += 3 * _elements(rows, keys, sizes) * 2 * sizes.itemsize
    return products + nbytes / at.bytes_per_s + _LAUNCHES * devices.LAUNCH_S


def _own(found: tuple[Tile, ...], rows: int, keys: int, sizes: Sizes, at: Speeds) -> float:
    pairs = sum(tile.pairs for tile in found) + rows * _BLOCK // 2  # each row ends within a block
    return _products(pairs, rows, keys, sizes, at.own, at.processors) + _OWN_LAUNCHES * devices.LAUNCH_S


def _products(pairs: int, rows: int, keys: int, sizes: Sizes, rate: Rate, processors: int) -> float:
    """Forwards run in parallel over blocks of queries, backwards over blocks of keys."""
    d, e = sizes.head_dim, sizes.v_head_dim
    busy = (min(1.0, -(-tokens // _BLOCK) * sizes.heads / processors) for tokens in (rows, keys))
    forward, backward = (each * 1e12 * share for each, share in zip(rate, busy, strict=True))
    return 2 * pairs * sizes.heads * ((d + e) / forward + (3 * d + 2 * e) / backward)


def _whole_blocks(tile: Tile) -> int:
    rows, keys = (-(-n // _BLOCK) for n in (len(tile.q), len(tile.k)))
    return _BLOCK**2 * (rows * keys if tile.full else rows * (rows + 1) // 2)


def _elements(rows: int, keys: int, sizes: Sizes) -> int:
    """Of out, dq, dk and dv."""
    size = sizes.head_dim + sizes.v_head_dim
    return (rows * sizes.heads + keys * sizes.kv_heads) * size


def _ordering(rows: Segments, keys: Segments, sizes: Sizes, at: Speeds) -> float:
    """q, dout, out and dq, and k and v twice and their gradients, gathered or scattered."""
    elements = _elements(sum(map(len, rows)), 0, sizes) * 2 + _elements(0, sum(map(len, keys)), sizes) * 3
    return elements * 2 * sizes.itemsize / at.bytes_per_s
