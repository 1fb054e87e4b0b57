"""What a method costs on top of the kernel it distributes, on one CUDA device.

    python ci/gpu/figures.py [--json FILE]

All ranks of a method run as threads on the one device (``ThreadMesh``), so their kernels follow each other and their
messages are copies. The time of all of them together, forward plus backward, stands against one call of the same kernel
on the whole sequence: 1.00x would be tiles, merges and moves for free. Calls alternate; medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem, providers
from cp_plugin.mesh import Mesh, run_threads
from cp_plugin.moves import no_gradients, nothing_seen
from cp_plugin.protocol import own


def inputs(problem: Problem, device: torch.device) -> list[Tensor]:
    """q, k, v and dout of the whole sequence."""
    g = torch.Generator(device).manual_seed(0)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.seq_length, problem.batch, h, problem.head_dim) for h in heads]
    return [torch.randn(shape, generator=g, device=device).to(problem.dtype) for shape in shapes]


def attend(cp: ContextParallel, problem: Problem, shards: list[Tensor]) -> None:
    """Forward and backward without autograd, which has one thread per device and would wait for itself."""
    q, k, v, dout = shards
    method = cp.method(problem, q.device, problem.head_dim**-0.5)
    out, lse = method.forward(q, k, v, own, own) or nothing_seen(q, v)
    delta = (dout.float() * out.float()).sum(-1)
    _ = method.backward(dout, q, k, v, lse, delta, own, own) or no_gradients(q, k, v)


def seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def contestant(name: str, problem: Problem, whole: list[Tensor]) -> Callable[[], object]:
    """One step of all ranks of a provider; its shards are cut beforehand."""
    settled = providers.settle(name, problem, Options())
    axes = settled.provider.axes(problem.size, settled.options)
    shards: dict[int, list[Tensor]] = {}

    def prepare(mesh: Mesh) -> None:
        cp = ContextParallel(name, mesh=mesh, problem=problem)
        shards[mesh.index] = [cp.shard(x) for x in whole]

    run_threads(prepare, axes)

    def rank(mesh: Mesh) -> None:
        attend(ContextParallel(name, mesh=mesh, problem=problem), problem, shards[mesh.index])

    return lambda: run_threads(rank, axes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--seq-length", type=int, default=65536)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("figures need a CUDA device: torch sees none here", file=sys.stderr)
        return 2
    device, rows = torch.device("cuda"), []
    for size in args.sizes:
        problem = Problem(size=size, heads=args.heads, kv_heads=args.kv_heads, seq_length=args.seq_length)
        whole = inputs(problem, device)
        one = Problem(size=1, heads=args.heads, kv_heads=args.kv_heads, seq_length=args.seq_length)
        runs = {"one kernel": lambda one=one, whole=whole: attend(ContextParallel("ring"), one, whole)}
        runs |= {name: contestant(name, problem, whole) for name in providers.names()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in track(range(args.rounds + 1), f"{size} ranks", console=Console(stderr=True)):
            for name, run in runs.items():
                took = seconds(run)
                if round_ > 0:  # the first one warms up
                    times[name].append(took)
        base = statistics.median(times["one kernel"])
        rows += [
            {"ranks": size, "provider": name, "ms": 1e3 * statistics.median(t), "ratio": statistics.median(t) / base}
            for name, t in times.items()
        ]
    table = Table("ranks", "provider", "ms", "over one kernel", title=f"causal, {args.seq_length} tokens, bfloat16")
    for row in rows:
        table.add_row(str(row["ranks"]), row["provider"], f"{row['ms']:.2f}", f"{row['ratio']:.2f}x")
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps({"setup": vars(args) | {"json": str(args.json)}, "figures": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
