"""Device time of the events of a ``Program``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from cp_plugin.engine.common.names import not_one_of
from cp_plugin.engine.core.tiles import Tile
from cp_plugin.engine.kernels import cost
from cp_plugin.engine.kernels.backends import devices
from cp_plugin.planner.machine.events import Attention, Direction, Event, Memory, Products, Shape
from cp_plugin.planner.machine.hardware import Device, Dtype, Kernel, Rate


def seconds(event: Event, device: Device) -> float:
    """Seconds on the device; 0 for communication. ValueError if the profile has no rate for the dtype."""
    match event:
        case Attention():
            return _attention(event, device)
        case Products():
            return event.flops / products_per_s(device, event.dtype) + event.launches * device.launch_s
        case Memory():
            return event.nbytes / device.memory_bytes_per_s + event.launches * device.launch_s
    return 0.0


def launches(event: Event) -> int:
    return event.launches if isinstance(event, Products | Memory) else int(isinstance(event, Attention))


def _attention(event: Attention, device: Device) -> float:
    kernel = kernel_for(device, event.dtype)
    rate = kernel.rate(event.direction, event.head_dim)
    at = auto_speeds(device.processors) if event.auto and event.dtype in _ALIKE else None
    if at is None:
        return _time_one_call(event, device, rate, kernel.block)
    parts, merged = cut_tiles(event, at)
    if parts:
        each = (_time_one_call(event._replace(shapes=(s,), rows=s.rows), device, rate, kernel.block) for s in parts)
        return sum(each) + merged / device.memory_bytes_per_s
    slower = getattr(at.library, event.direction) / getattr(at.own, event.direction)
    rate = rate.model_copy(update={"flops_per_s": rate.flops_per_s / slower})
    return _time_one_call(event, device, rate, kernel.block)


@lru_cache
def auto_speeds(processors: int) -> cost.Speeds | None:
    """What ``auto`` weighs by on a GPU of that many multiprocessors, its first choice installed; None: unknown."""
    family = _family(processors)
    return None if family is None else cost.speeds_on(family, *family.order[0][::3])


def assumed(device: Device) -> str:
    """The kernels that our methods are priced with, in words; "": one call for any tiles."""
    family, at = _family(device.processors), auto_speeds(device.processors)
    if family is None or at is None:
        return ""
    forward, backward = (own / theirs for own, theirs in zip(at.own, at.library, strict=True))
    return (
        f"kernels: as auto takes them where {family.order[0].title} is installed; ours, for many or small tiles, at "
        f"{forward:.0%} of its speed forward and {backward:.0%} backward, not measured"
    )


def _family(processors: int) -> devices.Family | None:
    known = (f for f in devices.FAMILIES if f.scale is not None and f.scale.processors == processors)
    return next(known, None)


@lru_cache(maxsize=8192)
def cut_tiles(event: Attention, at: cost.Speeds) -> tuple[tuple[Shape, ...], int]:
    """Calls of a library for a block, as ``auto`` cuts it, and the bytes of merging and sorting; none: our kernel."""
    assert event.auto is not None
    shapes, keys, kv_heads, *unsorted = event.auto
    if not 0 < len(shapes) <= cost.MOST:
        return (), 0
    tiles = [Tile(range(s.rows), range(s.keys), s.diagonal) for s in shapes]
    d, e = event.head_dim, event.v_head_dim
    sizes = cost.Sizes(event.heads, kv_heads, d, e, itemsize=2)
    parts = [Shape(len(t.q), len(t.k), t.diagonal) for tile in tiles for t in tile.cut()]
    if len(parts) == 1:
        return tuple(parts), 0
    library, own = cost.estimate_tiles(tiles, event.rows, keys, *unsorted, sizes, at)
    if library > own:
        return (), 0
    forward = event.direction == "forward"
    q_side, k_side = (event.heads * e, 0) if forward else (event.heads * d, kv_heads * (d + e))
    merged = sum(s.rows * q_side + s.keys * k_side for s in parts) * (sizes.itemsize + 8)
    moved = (unsorted[0] * event.heads + (1 if forward else 2) * unsorted[1] * kv_heads) * (d + e)
    return tuple(parts), merged + moved * 2 * sizes.itemsize


def _time_one_call(event: Attention, device: Device, rate: Rate, block: tuple[int, int]) -> float:
    if device.processors:
        in_blocks, longest = _count_pairs(event.shapes, event.direction, block)
        work = _each(event) * max(event.heads * in_blocks, device.processors * longest)
    else:
        work = flops(event, block)
    return rate.seconds(work, rows=event.heads * event.rows)


@lru_cache(maxsize=8192)
def _count_pairs(shapes: tuple[Shape, ...], direction: Direction, block: tuple[int, int]) -> tuple[int, int]:
    """(query, key) pairs of one head computed by a GPU: in all blocks, and in the longest one."""
    many = [(_pad_to_blocks(shape, block), n) for shape, n in Counter(shapes).items()]
    return sum(n * pairs(s, block) for s, n in many), max((_longest(s, direction, block) for s, _ in many), default=0)


def _pad_to_blocks(shape: Shape, block: tuple[int, int]) -> Shape:
    """The tile padded to whole blocks."""
    rows, keys = (-(-size // unit) * unit for size, unit in zip(shape[:2], block, strict=True))
    return Shape(rows, keys, keys - 1 if shape.diagonal >= shape.keys - 1 else shape.diagonal)


def _longest(shape: Shape, direction: Direction, block: tuple[int, int]) -> int:
    """Pairs of the longest block: forward a block of queries with its keys, backward a block of keys with its
    queries."""
    rows, keys = block
    if direction == "forward":
        return rows * pairs(Shape(1, shape.keys, shape.diagonal + shape.rows - 1), (1, keys))
    return keys * min(shape.rows, shape.rows + shape.diagonal + keys)


def flops(event: Attention, block: tuple[int, int] = (1, 1)) -> int:
    """FLOPs of the visible (query, key) pairs in whole blocks; a backward pass recomputes the scores."""
    seen = sum(n * pairs(shape, block) for shape, n in Counter(event.shapes).items())
    return seen * event.heads * _each(event)


def _each(event: Attention) -> int:
    """FLOPs per (query, key) pair and head."""
    d, e = event.head_dim, event.v_head_dim
    return 2 * (d + e) if event.direction == "forward" else 2 * (3 * d + 2 * e)


@lru_cache(maxsize=65536)
def pairs(shape: Shape, block: tuple[int, int] = (1, 1)) -> int:
    """(query, key) pairs in all blocks of the tile with a visible pair."""
    rows, keys = block
    last = np.minimum(np.arange(rows, shape.rows + rows, rows), shape.rows) - 1  # row of each block of rows
    visible = np.clip(last + shape.diagonal + 1, 0, shape.keys)
    columns = np.minimum(-(-visible // keys) * keys, shape.keys)
    heights = np.diff(last, prepend=-1)
    return int((columns * heights).sum())


def kernel_for(device: Device, dtype: str) -> Kernel:
    """The device's attention rates for a dtype; ValueError if its profile has none."""
    return _find(device, device.attention, dtype, "attention")


def products_per_s(device: Device, dtype: str) -> float:
    """FLOP/s of the device's matrix products in a dtype; ValueError if its profile has none."""
    return _find(device, device.gemm_flops_per_s, dtype, "matrix-product")


def _find[T](device: Device, rates: Mapping[Dtype, T], dtype: str, what: str) -> T:
    rate = rates.get(dtype) or rates.get(_ALIKE.get(dtype, dtype))  # type: ignore[call-overload]
    if rate is None:
        raise ValueError(not_one_of(f"the profile of {device.name} has no {what} rate for {dtype}", dtype, rates))
    return rate


_ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}
