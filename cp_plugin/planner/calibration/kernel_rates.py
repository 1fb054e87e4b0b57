"""Kernel calibration: attention, matrix products and passes over memory, timed with all ranks at work.

Ranks that share a processor are thus measured as they will run, each with its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.dtypes import accumulation_dtype, dtype_name
from cp_plugin.engine.core.mask import Mask
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.values import KeyValues, Queries
from cp_plugin.engine.kernels import blocks, fused
from cp_plugin.engine.kernels.backends import BlockKernel
from cp_plugin.engine.kernels.fused import observed
from cp_plugin.planner.machine import kernel_time
from cp_plugin.planner.machine.events import Attention, Direction, Shape
from cp_plugin.planner.machine.hardware import Kernel, Rate
from cp_plugin.planner.trace.memory import Meter, Passes
from cp_plugin.testing.clock import timed

Shown = Callable[[str], object]
WINDOW_S = 0.15
"""Duration for which a call is repeated."""
_BLOCKS = ((1, 1), (32, 32), (64, 64), (128, 128), (32, 512), (64, 512), (256, 512))
"""Candidate kernel blocks (queries, keys); torch's CPU kernel takes 512 keys at a time."""


class Sizes(NamedTuple):
    head_dim: int
    heads: tuple[int, ...]
    tiles: tuple[tuple[int, int], ...]
    """Queries, keys; square ones are also measured causal."""
    matrix: int
    rows: tuple[int, ...]
    """Tokens of passes over memory."""


ON_CPU = Sizes(64, (4,), ((32, 32), (64, 256), (128, 128), (256, 256), (128, 1024), (512, 512)), 512, (4, 64, 1024))
ON_CUDA = Sizes(
    128, (8, 32), ((256, 256), (1024, 1024), (1024, 4096), (4096, 4096), (8192, 8192)), 8192, (16, 1024, 32768)
)


class Timed(NamedTuple):
    event: Attention
    seconds: float


def seconds_each(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds per call with all ranks calling repeatedly: harmonic mean over ranks. Collective."""
    call()
    dist.barrier()
    own_seconds = _time_on_cuda(call) if device.type == "cuda" else _time_on_cpu(call)
    rates = gather_objects(1 / own_seconds)
    return len(rates) / sum(rates)


def _time_on_cpu(call: Callable[[], Any]) -> float:
    start, calls = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < WINDOW_S or calls == 0:
        call()
        calls += 1
    return took / calls


def _time_on_cuda(call: Callable[[], Any]) -> float:
    """Median over five series of back-to-back calls."""

    def series(calls: int) -> float:
        return timed(lambda mark: [call() for _ in range(calls)], torch.device("cuda")).total / calls

    series(2)
    calls = max(3, min(200, int(WINDOW_S / 5 / series(2))))
    return sorted(series(calls) for _ in range(5))[2]


def attention(device: torch.device, dtype: torch.dtype, sizes: Sizes, shown: Shown) -> Kernel:
    """Rates of the attention kernel that ``auto`` selects on this device. Collective."""
    name = dtype_name(dtype)
    problem = Problem(size=1, head_dim=sizes.head_dim, dtype=dtype)
    chosen = blocks.choose(Options(), problem, device)
    times: dict[Direction, list[Timed]] = {"forward": [], "backward": []}
    for heads in sizes.heads:
        for rows, keys in sizes.tiles:
            for causal in (False, True)[: 2 if rows == keys else 1]:
                shown(f"attention in {name}, {rows} x {keys}{', causal' * causal}, {heads} heads")
                shape = Shape(rows, keys, 0 if causal else keys - 1)
                for direction, call in _calls(chosen.kernel, shape, heads, sizes.head_dim, dtype, device).items():
                    event = Attention(direction, (shape,), rows, heads, sizes.head_dim, sizes.head_dim, name)
                    times[direction].append(Timed(event, seconds_each(call, device)))
    return as_kernel(times["forward"], times["backward"], f"measured: {chosen.name}")


def as_kernel(forward: Sequence[Timed], backward: Sequence[Timed], source: str) -> Kernel:
    """Rates and block size that fit the times best."""
    fits = {block: [_fitted(timed, block) for timed in (forward, backward)] for block in _BLOCKS}
    block = min(fits, key=lambda block: sum(fitted.error**2 for fitted in fits[block]))
    rates = (
        Rate(flops_per_s=1 / max(flop, 1e-16), overhead_s=overhead, row_s=row)
        for overhead, row, flop in (fitted.figures for fitted in fits[block])
    )
    return Kernel(forward=next(rates), backward=next(rates), block=block, source=source)


def _calls(
    kernel: BlockKernel, shape: Shape, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[Direction, Callable[[], Any]]:
    def random(tokens: int) -> Tensor:
        return torch.randn(tokens, 1, heads, head_dim, dtype=dtype, device=device)

    q, k, v, dout = random(shape.rows), random(shape.keys), random(shape.keys), random(shape.rows)
    mask = Mask.from_arguments(causal=shape.diagonal == 0)
    block = Block((range(shape.rows),), (range(shape.keys),), mask, Scores(head_dim**-0.5))
    queries, kv = Queries(q), KeyValues(k, v)
    part = kernel.forward(queries, kv, block)
    assert part is not None, "it finds the tile empty"
    wide = accumulation_dtype(dtype)
    delta = (dout.to(wide) * part.out.to(wide)).sum(-1)
    with_dout = Queries(q, dout, part.lse, delta)
    return {
        "forward": lambda: kernel.forward(queries, kv, block),
        "backward": lambda: kernel.backward(with_dout, kv, block),
    }


def _fitted(timed: Sequence[Timed], block: tuple[int, int]) -> Fit:
    """Seconds per call, per query token and head, and per FLOP."""
    work = [(1.0, float(t.event.heads * t.event.rows), float(kernel_time.flops(t.event, block))) for t in timed]
    return fit(work, [t.seconds for t in timed])


def products(device: torch.device, dtype: torch.dtype, sizes: Sizes, shown: Shown) -> float:
    """FLOP/s of large matrix products. Collective."""
    shown(f"matrix products in {str(dtype).removeprefix('torch.')}")
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).to(dtype) for _ in range(2))
    return 2 * sizes.matrix**3 / seconds_each(lambda: a @ b, device)


def memory(device: torch.device, sizes: Sizes, shown: Shown) -> tuple[float, float]:
    """Bytes per second and launch seconds of the methods' passes over memory: merge, add, copy. Collective."""
    work, seconds = [], []
    for rows in sizes.rows:
        shown(f"passes over memory, {rows} tokens")
        out, other = (torch.randn(rows, 1, sizes.heads[-1], sizes.head_dim, device=device) for _ in range(2))
        lse, other_lse = out[..., 0].contiguous(), other[..., 0].contiguous()
        for operation, tensors in (
            (fused.merge_into, (out, lse, other, other_lse)),
            (torch.add, (out, other)),
            (torch.clone, (out,)),
        ):
            work.append(_counted(operation, tensors, one=device.type == "cuda"))
            seconds.append(seconds_each(lambda f=operation, x=tensors: f(*x), device))  # type: ignore[misc]
    launch, byte = fit(work, seconds).figures
    return 1 / max(byte, 1e-14), launch


def _counted(operation: Callable[..., Any], tensors: Sequence[Tensor], *, one: bool) -> tuple[float, float]:
    """Launches and bytes as counted by ``Passes``; ``one``: an operation of ``fused`` is one kernel."""
    counts = [0.0, 0.0]

    def add(nbytes: int, launches: int) -> None:
        counts[0] += launches
        counts[1] += nbytes

    without_data = [torch.empty_like(t, device="meta") for t in tensors]
    with Passes(add, lambda flops, dtype: None, Meter()) as passes, observed(passes.one_pass if one else None):
        operation(*without_data)
    return counts[0], counts[1]


class Fit(NamedTuple):
    """``seconds ~ work @ figures``."""

    figures: tuple[float, ...]
    """Seconds per unit of each kind of work, none negative."""
    error: float
    """Root mean square of the relative errors."""


def fit(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Fit seconds per unit of work; ValueError for fewer measurements than figures, or a time that is not positive.

    work: ``[measurement, kind]``, amount of each kind of work.
    """
    rows, taken = np.asarray(work, dtype=float), np.asarray(seconds, dtype=float)
    if len(rows) < rows.shape[1]:
        raise ValueError(f"{len(rows)} measurements cannot give {rows.shape[1]} figures")
    if not (taken > 0).all():
        raise ValueError(f"times must be positive, not {taken.min():g} s")
    relative = rows / taken[:, None]
    columns = range(rows.shape[1])
    fits = [_fit(relative, list(chosen)) for n in columns for chosen in combinations(columns, n + 1)]
    return min((f for f in fits if min(f.figures) >= 0), key=lambda f: f.error)


def _fit(relative: np.ndarray, chosen: list[int]) -> Fit:
    """Unconstrained fit of the chosen columns, scaled because they differ by many orders of magnitude."""
    columns = relative[:, chosen]
    scale = np.abs(columns).max(0)
    scale[scale == 0] = 1
    solved = np.linalg.lstsq(columns / scale, np.ones(len(relative)), rcond=None)[0] / scale
    error = float(np.sqrt(np.mean((columns @ solved - 1) ** 2)))
    figures = np.zeros(relative.shape[1])
    figures[chosen] = solved
    return Fit(tuple(figures.tolist()), error)
