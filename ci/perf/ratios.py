"""Performance as ratios, each measured side by side in one run: alternating calls, medians.

    python ci/perf/ratios.py            both ratios, a table, PASS or FAIL with the exit status to match
    python ci/perf/ratios.py --json     the same as JSON

1. Balance: two ranks on two cores, causal, compute-bound. Striped tokens against the contiguous ring: theory 1.5x.
2. Overhead: one rank. The provider path against ``scaled_dot_product_attention`` on the same tensors.

Every figure is forward plus backward. Before anything is timed the two sides must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.launch import run_ranks

SCALE = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """``baseline_ms / ours_ms`` and the bound it has to reach."""

    name: str
    setup: str
    baseline_ms: float
    ours_ms: float
    ratio: float
    wanted: float

    @property
    def ok(self) -> bool:
        return self.ratio >= self.wanted


def tensors(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v that require gradients, and dout."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(tokens, 1, h, 64, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads, heads))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def milliseconds(step: Callable[[], object]) -> float:
    """One call, as the slowest rank sees it."""
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    step()
    elapsed = torch.tensor(time.perf_counter() - start)
    if dist.is_initialized():
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item() * 1e3


def alternate(baseline: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median milliseconds of both, and the median of the ratios of neighbouring calls."""
    baseline(), ours()
    times = []
    for i in range(rounds):  # who goes first changes every round
        pair = (baseline, ours) if i % 2 == 0 else (ours, baseline)
        both = [milliseconds(step) for step in pair]
        times.append(tuple(both if i % 2 == 0 else reversed(both)))
    ratio = statistics.median(a / b for a, b in times)
    return statistics.median(a for a, _ in times), statistics.median(b for _, b in times), ratio


def step_of(cp: ContextParallel, tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    q, k, v, dout = (
        cp.shard(x.detach()).requires_grad_(x.requires_grad) for x in tensors(tokens, heads, kv_heads, dtype)
    )

    def step() -> Tensor:
        out = cp.attention(q, k, v, scale=SCALE)
        out.backward(dout)
        return cp.unshard(out.detach())

    return step


def balance(rounds: int) -> Ratio:
    tokens, heads, kv_heads = 16384, 4, 4

    def rank() -> tuple[float, float, float]:
        ring, striped = (
            step_of(ContextParallel(name, group=dist.group.WORLD), tokens, heads, kv_heads, torch.float32)
            for name in ("ring", "striped")
        )
        torch.testing.assert_close(striped(), ring(), rtol=1e-4, atol=1e-5)
        return alternate(ring, striped, rounds)

    baseline, ours, ratio = run_ranks(rank, 2, init_process_group=True, timeout=600)[0]
    setup = f"2 ranks, causal, {tokens} tokens, {heads} heads x 64, float32"
    return Ratio(
        name="striped over contiguous ring", setup=setup, baseline_ms=baseline, ours_ms=ours, ratio=ratio, wanted=1.38
    )


def overhead(dtype: torch.dtype, rounds: int) -> Ratio:
    tokens, heads, kv_heads = 16384, 4, 1
    ours = step_of(ContextParallel("ring"), tokens, heads, kv_heads, dtype)
    q, k, v, dout = tensors(tokens, heads, kv_heads, dtype)

    def plain() -> Tensor:
        views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, scale=SCALE, enable_gqa=True)
        out.permute(2, 0, 1, 3).backward(dout)
        return out.detach().permute(2, 0, 1, 3)

    torch.testing.assert_close(ours(), plain())
    baseline, mine, ratio = alternate(plain, ours, rounds)
    setup = f"1 rank, causal, {tokens} tokens, {heads}:{kv_heads} heads x 64, {str(dtype).removeprefix('torch.')}"
    return Ratio(
        name="plain SDPA over provider path",
        setup=setup,
        baseline_ms=baseline,
        ours_ms=mine,
        ratio=ratio,
        wanted=1 / 1.03,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each side (default 15)")
    rounds = parser.parse_args().rounds
    as_json = "--json" in sys.argv
    todo = [
        lambda: balance(rounds),
        lambda: overhead(torch.float32, rounds),
        lambda: overhead(torch.bfloat16, rounds),
    ]
    found = [measure() for measure in track(todo, description="measuring", disable=as_json)]
    good = all(r.ok for r in found)
    if as_json:
        print(json.dumps([asdict(r) for r in found], indent=2))
        return not good
    table = Table("ratio", "setup", "baseline ms", "ours ms", "measured", "wanted", title="Forward + backward, medians")
    for r in found:
        cells = (f"{r.baseline_ms:.1f}", f"{r.ours_ms:.1f}", f"{r.ratio:.3f}x", f">= {r.wanted:.3f}x")
        table.add_row(r.name, r.setup, *cells, style=None if r.ok else "red")
    console = Console()
    console.print(table)
    console.print("PASS" if good else "FAIL", style="bold green" if good else "bold red")
    return not good


if __name__ == "__main__":
    sys.exit(main())
