"""Cost model of a block: a library kernel in tiles against one launch of ours.

    library    faster products; launches per tile, and merging
    own        slower products, seven instead of five in the backward pass; nothing to merge, whatever the mask

Estimated seconds of forward plus backward, from the speeds in ``kernels.backends.devices``; meaningful only relative to
each other. Pure Python on shapes, cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cp_plugin.engine.core.layout import Segments, sort_positions
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.tiles import Tile, tiles_up_to
from cp_plugin.engine.kernels.backends import AnyBackend, devices
from cp_plugin.engine.kernels.backends.devices import Family, Rate

MOST = 256
"""Blocks of more tiles go to our own kernel."""
_BLOCK = 128
"""Approximate kernel block size."""
_LAUNCHES, _OWN_LAUNCHES = 10, 3
"""Per tile: kernel, sign of the log-sum-exp, merge; three kernels, dense log-sum-exp, three sums. Own: one forward, two
backward.
"""
_SUMS = 8
"""Bytes to read and write an element of a float32 running sum."""
_CPU = torch.device("cpu")


class Sizes(NamedTuple):
    """Sizes of a block's tensors besides tokens."""

    heads: int
    """Query heads times batch."""
    kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int

    @classmethod
    def from_tensors(cls, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        """Read the sizes of ``[s, b, h, d]``, ``[s, b, g, d]`` and ``[s, b, g, e]``."""
        return cls(q.size(1) * q.size(2), q.size(1) * k.size(2), q.size(3), v.size(3), q.element_size())


class Speeds(NamedTuple):
    """Speeds of a library kernel and ours on one GPU."""

    library: Rate
    own: Rate
    processors: int
    bytes_per_s: float


class Cost(NamedTuple):
    """Estimates for a block."""

    tiles: int | None
    """Library calls per direction; None: not counted."""
    library_s: float
    own_s: float

    @property
    def prefers_library(self) -> bool:
        """True if the library runs the block."""
        return self.library_s <= self.own_s


def speeds(backend: AnyBackend, device: torch.device) -> Speeds | None:
    """Speeds for the backend that ``auto`` chose and ours; None if unknown."""
    family = devices.family(torch.cuda.get_device_capability(device))
    return speeds_on(family, backend.name, getattr(backend, "generation", None))


def speeds_on(family: Family, backend: str, generation: int | None = None) -> Speeds | None:
    """The same for a GPU family."""
    line, scale = family.candidate(backend, generation), family.scale
    if line is None or line.rate is None or scale is None:
        return None
    return Speeds(line.rate, scale.own, scale.processors, scale.bytes_per_s)


@lru_cache(maxsize=1024)
def cost(rows: Segments, keys: Segments, mask: Mask, sizes: Sizes, at: Speeds | None, enough: int = 0) -> Cost:
    """The estimate for a block of these positions.

    Args:
        at: None: the library runs single tiles only.
        enough: run length from which our kernels skip sorting.
    """
    if at is None and (mask.left is not None or mask.documents):
        return Cost(None, 1.0, 0.0)
    (q_runs, q_order), (k_runs, k_order) = sort_positions(rows, _CPU), sort_positions(keys, _CPU)
    tiles = tiles_up_to(MOST, q_runs, k_runs, mask)
    calls = None if tiles is None else sum(len(tile.cut()) for tile in tiles)
    if calls is not None and calls <= 1:
        return Cost(calls, 0.0, 1.0)
    if tiles is None or at is None:
        return Cost(calls, 1.0, 0.0)
    tokens = [sum(map(len, side)) for side in (rows, keys)]
    unsorted = [0 if order is None else n for order, n in zip((q_order, k_order), tokens, strict=True)]
    library, own = estimate_tiles(tiles, *tokens, *unsorted, sizes, at)
    short = [n if min(map(len, side)) < enough else 0 for side, n in zip((rows, keys), unsorted, strict=True)]
    return Cost(calls, library, own + _ordering(*short, sizes, at))


def estimate_tiles(
    tiles: Sequence[Tile], rows: int, keys: int, unsorted_rows: int, unsorted_keys: int, sizes: Sizes, at: Speeds
) -> tuple[float, float]:
    """Seconds of a library, which sorts tokens first, and of our kernel without sorting, for a block of these."""
    library = sum(_tile(part, sizes, at) for tile in tiles for part in tile.cut())
    pairs = sum(tile.pairs for tile in tiles) + rows * _BLOCK // 2  # each row ends within a block
    own = _products(pairs, rows, keys, sizes, at.own, at.processors) + _OWN_LAUNCHES * devices.LAUNCH_S
    return library + _ordering(unsorted_rows, unsorted_keys, sizes, at), own


def _tile(tile: Tile, sizes: Sizes, at: Speeds) -> float:
    rows, keys = len(tile.q), len(tile.k)
    down, across = (-(-n // _BLOCK) for n in (rows, keys))
    pairs = _BLOCK**2 * (down * across if tile.full else down * (down + 1) // 2)  # of whole blocks
    products = _products(pairs, rows, keys, sizes, at.library, at.processors)
    nbytes = _elements(rows, keys, sizes) * (sizes.itemsize + _SUMS)
    if tile.q.step < 0:  # inputs and outputs are copied in reverse
        nbytes += 3 * _elements(rows, keys, sizes) * 2 * sizes.itemsize
    return products + nbytes / at.bytes_per_s + _LAUNCHES * devices.LAUNCH_S


def _products(pairs: int, rows: int, keys: int, sizes: Sizes, rate: Rate, processors: int) -> float:
    """Forwards are parallel over blocks of queries, backwards over blocks of keys."""
    d, e = sizes.head_dim, sizes.v_head_dim
    busy = (min(1.0, -(-tokens // _BLOCK) * sizes.heads / processors) for tokens in (rows, keys))
    forward, backward = (each * 1e12 * share for each, share in zip(rate, busy, strict=True))
    return 2 * pairs * sizes.heads * ((d + e) / forward + (3 * d + 2 * e) / backward)


def _elements(rows: int, keys: int, sizes: Sizes) -> int:
    """Elements of out, dq, dk and dv."""
    size = sizes.head_dim + sizes.v_head_dim
    return (rows * sizes.heads + keys * sizes.kv_heads) * size


def _ordering(rows: int, keys: int, sizes: Sizes, at: Speeds) -> float:
    """Gather or scatter of q, dout, out, dq, of k and v (twice) and their gradients."""
    return (_elements(rows, 0, sizes) * 2 + _elements(0, keys, sizes) * 3) * 2 * sizes.itemsize / at.bytes_per_s
