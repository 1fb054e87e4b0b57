"""Performance ratios, measured side by side in one run: alternating calls, medians.

    python ci/perf/ratios.py                      a table, PASS or FAIL with a matching exit status
    python ci/perf/ratios.py --json               the same as JSON
    python ci/perf/ratios.py --release VERSION    also record them in released.json

1. Balance: two ranks on two cores, causal, compute-bound: striped tokens against the contiguous ring (theory: 1.5x).
2. Upstream: two ranks: PyTorch's context-parallel ring against ours, both on zigzag tokens.
3. Overhead: one rank: the provider path against ``scaled_dot_product_attention`` on the same tensors.
4. Each against itself in the last release, if recorded in released.json.

All figures are forward plus backward, timed after both sides agree. Needs a quiet machine: if others take more than
``BUSY`` of the processors, nothing is recorded and the exit status is 3. A virtual machine's processor may also run at
half its speed while a neighbour uses the same core, which no counter shows here. So a fixed computation is timed on
every rank before and after each call, and a call beside a slow one is repeated; if too few calls had full speed, the
exit status is 3 as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from cp_plugin import ContextParallel
from cp_plugin.attention.calls import Inputs
from cp_plugin.cli.bench.report import Processors
from cp_plugin.cli.bench.torch_ring import TorchRing
from cp_plugin.testing.clock import once
from cp_plugin.testing.launch import run_ranks

SCALE = 0.125
BUSY = 0.05
"""Share of all processors' time."""
FULL_SPEED = 1.2
"""At most this much longer than in the fastest moment does the fixed computation take at full speed."""
RELEASED = Path(__file__).with_name("released.json")
PATIENCE = 4
"""Calls of each side per call that is wanted."""
SLOWER = 0.97
"""Lower limit of the ratio to upstream, and to itself in the last release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """``baseline_ms / ours_ms`` and its lower limit."""

    name: str
    setup: str
    baseline_ms: float
    ours_ms: float
    ratio: float
    wanted: float
    calls: int
    """Of each side."""
    at_full_speed: bool
    """Whether enough of them were, so that only those count; if not, all do."""
    same_kernel: bool = False
    """On both sides, so that anything above 1 is noise."""

    @property
    def ok(self) -> bool:
        return self.ratio >= self.wanted


def tensors(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v that require gradients, and dout."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(tokens, 1, h, 64, generator=g).to(dtype) for h in (heads, kv_heads, kv_heads, heads))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout]


def milliseconds(step: Callable[[], object]) -> float:
    """One call, timed by the slowest rank."""
    elapsed = torch.tensor(once(lambda mark: step(), torch.device("cpu")).total)
    if dist.is_initialized():
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item() * 1e3


class Call(NamedTuple):
    """Milliseconds of a call, and of the fixed computation beside it: the slower of before and after."""

    ms: float
    beside: float


class Speed:
    """Times calls, and tells which of them had all processors at full speed. The same on every rank."""

    def __init__(self) -> None:
        self._fastest = min(_fixed_computation() for _ in range(20))

    def timed(self, step: Callable[[], object]) -> Call:
        """One call, begun at full speed if that comes within some seconds."""
        for _ in range(50):
            before = self._now()
            if self.full(before):
                break
        return Call(milliseconds(step), max(before, self._now()))

    def full(self, ms: float) -> bool:
        return ms <= FULL_SPEED * self._fastest

    def _now(self) -> float:
        ms = _fixed_computation()
        self._fastest = min(self._fastest, ms)
        return ms


def _fixed_computation() -> float:
    """Milliseconds of the shortest of some, so that a moment's interruption does not count."""
    return min(milliseconds(lambda: sum(i & 7 for i in range(100_000))) for _ in range(6))


def alternate(baseline: Callable[[], object], ours: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Fields of ``Ratio``: median milliseconds of both sides, and median ratio of calls made one after the other."""
    baseline(), ours()
    speed, calls = Speed(), {baseline: [], ours: []}

    def counted(step: Callable[[], object]) -> list[float]:
        return [call.ms for call in calls[step] if speed.full(call.beside)]

    for i in range(PATIENCE * rounds):
        for step in calls if i % 2 == 0 else reversed(calls):  # who goes first changes every round
            calls[step].append(speed.timed(step))
        if all(len(counted(step)) >= rounds for step in calls):
            break
    pairs = list(zip(counted(baseline), counted(ours), strict=False))[:rounds]
    enough = len(pairs) == rounds
    pairs = pairs if enough else [(a.ms, b.ms) for a, b in zip(*calls.values(), strict=True)]
    return {
        "baseline_ms": statistics.median(a for a, _ in pairs),
        "ours_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "calls": len(calls[ours]),
        "at_full_speed": enough,
    }


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

    def rank() -> dict[str, Any]:
        ring, striped = (
            step_of(ContextParallel(name, group=dist.group.WORLD), tokens, heads, kv_heads, torch.float32)
            for name in ("ring", "striped")
        )
        torch.testing.assert_close(striped(), ring(), rtol=1e-4, atol=1e-5)
        return alternate(ring, striped, rounds)

    setup = f"2 ranks, causal, {tokens} tokens, {heads} heads x 64, float32"
    return Ratio(name="striped over contiguous ring", setup=setup, wanted=1.38, **_on_two_ranks(rank))


def upstream(rounds: int) -> Ratio:
    tokens, heads = 16384, 4

    def rank() -> dict[str, Any]:
        theirs = TorchRing(dist.group.WORLD, causal=True, rotate="alltoall", hops="p2p")
        own = ContextParallel("ring", group=dist.group.WORLD, layout="zigzag")
        whole = [x.detach() for x in tensors(tokens, heads, heads, torch.float32)]
        shards = Inputs(*map(theirs.shard, whole))
        q, k, v, dout = (own.shard(x).requires_grad_() for x in whole)

        def ours() -> Tensor:
            out = own.attention(q, k, v)
            out.backward(dout.detach())
            return out.detach()

        torch.testing.assert_close(ours(), theirs.step(shards)[0].permute(2, 0, 1, 3), rtol=1e-4, atol=1e-5)
        return alternate(lambda: theirs.step(shards), ours, rounds)

    setup = f"2 ranks, causal, zigzag, {tokens} tokens, {heads} heads x 64, float32"
    return Ratio(name="PyTorch's ring over ours", setup=setup, wanted=SLOWER, **_on_two_ranks(rank))


def _on_two_ranks(rank: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return run_ranks(rank, 2, init_process_group=True, timeout=600)[0]


def overhead(dtype: torch.dtype, rounds: int) -> Ratio:
    tokens, heads, kv_heads = 16384, 4, 1
    ours = step_of(ContextParallel("ring", group=None), tokens, heads, kv_heads, dtype)
    q, k, v, dout = tensors(tokens, heads, kv_heads, dtype)

    def plain() -> Tensor:
        views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*views, is_causal=True, scale=SCALE, enable_gqa=True)
        out.permute(2, 0, 1, 3).backward(dout)
        return out.detach().permute(2, 0, 1, 3)

    torch.testing.assert_close(ours(), plain())
    setup = f"1 rank, causal, {tokens} tokens, {heads}:{kv_heads} heads x 64, {str(dtype).removeprefix('torch.')}"
    name = "plain SDPA over provider path"
    return Ratio(name=name, setup=setup, wanted=1 / 1.03, same_kernel=True, **alternate(plain, ours, rounds))


def held_to(found: list[Ratio], released: dict[str, float]) -> list[Ratio]:
    """Raise limits to those of the last release."""

    def limit(r: Ratio) -> float:
        before = released.get(_key(r), 0.0)
        return SLOWER * (min(before, 1.0) if r.same_kernel else before)

    return [replace(r, wanted=max(r.wanted, limit(r))) for r in found]


def _key(ratio: Ratio) -> str:
    return f"{ratio.name}, {ratio.setup.rsplit(', ', 1)[-1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls of each side, at full speed (default 9)")
    parser.add_argument("--release", help="record these ratios as those of this version")
    given = parser.parse_args()
    rounds, processors = given.rounds, Processors()
    todo = [
        lambda: balance(rounds),
        lambda: upstream(rounds),
        lambda: overhead(torch.float32, rounds),
        lambda: overhead(torch.bfloat16, rounds),
    ]
    measured = [measure() for measure in track(todo, description="measuring", disable=given.json)]
    others, before = processors.others(), released()
    found = held_to(measured, before)
    good = all(r.ok for r in found)
    if given.json:
        print(json.dumps([asdict(r) for r in found], indent=2))
    else:
        _show(found, before, good)
    if others > BUSY:
        print(f"other programs took {others:.0%} of the processors: nothing is recorded", file=sys.stderr)
        return 3 if good else 1
    if not all(r.at_full_speed for r in found):
        print("the processors ran at full speed beside too few calls: nothing is recorded", file=sys.stderr)
        return 3
    ratios = {_key(r): round(r.ratio, 4) for r in found}
    if given.release is not None:
        write_release(given.release, ratios)
    return not good


def released(file: Path = RELEASED) -> dict[str, float]:
    """Ratios of the last release by name; empty if none are recorded."""
    return json.loads(file.read_text())["ratios"] if file.exists() else {}


def write_release(version: str, ratios: Mapping[str, float], file: Path = RELEASED) -> None:
    """Record the reference for later measurements."""
    file.write_text(json.dumps({"version": version, **_measured_here(), "ratios": dict(ratios)}, indent=1) + "\n")


def _measured_here() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=RELEASED.parent, capture_output=True, text=True
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or "not known",
        "machine": f"{_processor()}, {platform.system()}",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _show(found: list[Ratio], released: dict[str, float], good: bool) -> None:
    columns = ("ratio", "setup", "calls", "baseline ms", "ours ms", "measured", "released", "wanted")
    table = Table(*columns, title="Forward + backward, medians")
    for r in found:
        before = f"{released[_key(r)]:.3f}x" if _key(r) in released else ""
        cells = (f"{r.baseline_ms:.1f}", f"{r.ours_ms:.1f}", f"{r.ratio:.3f}x", before, f">= {r.wanted:.3f}x")
        calls = f"{r.calls}" if r.at_full_speed else f"{r.calls}, disturbed"
        table.add_row(r.name, r.setup, calls, *cells, style=None if r.ok else "red")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if not released:
        console.print("no release is recorded yet: --release VERSION does it")
    console.print("PASS" if good else "FAIL", style="bold green" if good else "bold red")


if __name__ == "__main__":
    sys.exit(main())
