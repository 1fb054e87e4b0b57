"""Device time of the events of a ``Program``."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

from cp_plugin.common.text import in_words
from cp_plugin.planner.machine.events import Attention, Direction, Event, Memory, Products, Shape
from cp_plugin.planner.machine.hardware import Device, Kernel


def seconds(event: Event, device: Device) -> float:
    """Seconds on the device; 0 for communication. ValueError if the profile has no rate for the dtype."""
    match event:
        case Attention():
            return _attention(event, device)
        case Products():
            return event.flops / _rate(device, event.dtype) + event.launches * device.launch_s
        case Memory():
            return event.nbytes / device.memory_bytes_per_s + event.launches * device.launch_s
    return 0.0


def launches(event: Event) -> int:
    return event.launches if isinstance(event, Products | Memory) else int(isinstance(event, Attention))


def _attention(event: Attention, device: Device) -> float:
    kernel = kernel_for(device, event.dtype)
    rate = kernel.rate(event.direction, event.head_dim)
    if device.processors:
        in_blocks, longest = _of_gpu(event.shapes, event.direction, kernel.block)
        work = _each(event) * max(event.heads * in_blocks, device.processors * longest)
    else:
        work = flops(event, kernel.block)
    return rate.seconds(work, rows=event.heads * event.rows)


@lru_cache(maxsize=8192)
def _of_gpu(shapes: tuple[Shape, ...], direction: Direction, block: tuple[int, int]) -> tuple[int, int]:
    """(query, key) pairs of one head computed by a GPU: in all blocks, and in the longest one."""
    many = [(_in_blocks(shape, block), n) for shape, n in Counter(shapes).items()]
    return sum(n * pairs(s, block) for s, n in many), max((_longest(s, direction, block) for s, _ in many), default=0)


def _in_blocks(shape: Shape, block: tuple[int, int]) -> Shape:
    """The tile padded to whole blocks."""
    rows, keys = (-(-size // of) * of for size, of in zip(shape[:2], block, strict=True))
    return Shape(rows, keys, keys - 1 if shape.diagonal >= shape.keys - 1 else shape.diagonal)


def _longest(shape: Shape, direction: Direction, block: tuple[int, int]) -> int:
    """Pairs of the longest block: forward a block of queries with its keys, backward a block of keys with its
    queries."""
    rows, keys = block
    if direction == "forward":
        return rows * pairs(Shape(1, shape.keys, shape.diagonal + shape.rows - 1), (1, keys))
    return keys * min(shape.rows, shape.rows + shape.diagonal + keys)


def flops(event: Attention, block: tuple[int, int] = (1, 1)) -> int:
    """FLOPs of the visible (query, key) pairs in whole blocks; a backward recomputes the scores."""
    found = sum(n * pairs(shape, block) for shape, n in Counter(event.shapes).items())
    return found * event.heads * _each(event)


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
    found = device.attention.get(dtype) or device.attention.get(_ALIKE.get(dtype, dtype))  # type: ignore[call-overload]
    if found is None:
        raise ValueError(
            f"the profile of {device.name} has no attention rate for {dtype}, only for "
            f"{', '.join(map(in_words, device.attention))}: add it, or use one of these"
        )
    return found


def _rate(device: Device, dtype: str) -> float:
    found = device.gemm_flops_per_s.get(dtype) or device.gemm_flops_per_s.get(_ALIKE.get(dtype, dtype))  # type: ignore[call-overload]
    if found is None:
        raise ValueError(f"the profile of {device.name} has no matrix-product rate for {dtype}: add it")
    return found


_ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}
