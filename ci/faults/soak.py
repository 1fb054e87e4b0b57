"""Leak check: all providers in rotation on one set of ranks, for many steps.

    python ci/faults/soak.py --steps 150          every change
    python ci/faults/soak.py --steps 2500         every night
    python ci/faults/soak.py --steps 150 --plant groups     a planted leak: groups, descriptors or memory

A turn creates a provider's process groups, runs some attention steps forward and backward, and destroys the groups.
Resources are sampled after every rotation; the first third is warm-up. Exits with 1 if anything grew.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from math import ceil
from statistics import mean
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer

from cp_plugin import Problem
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Inputs, Setup, call_through_autograd, setups, shapes
from cp_plugin.engine.comm import GroupMesh, axis_groups
from cp_plugin.engine.core.options import Options
from cp_plugin.testing.launch import RankError, run_ranks

STEPS_A_TURN = 2
BOUNDS = {"memory, MB": 8.0, "file descriptors": 4.0, "process groups": 0.0, "threads of Python": 0.0, "threads": 8.0}
"""Largest allowed growth of the mean from the middle third of the samples to the last third."""
PLANTS = ("", "groups", "descriptors", "memory")


def resources() -> list[float]:
    """What this process has, in the order of ``BOUNDS``."""
    process, groups = psutil.Process(), len(dist.distributed_c10d._world.pg_map)
    memory, threads = process.memory_info().rss / 1e6, threading.active_count()
    return [memory, process.num_fds(), groups, threads, process.num_threads()]


def soak(steps: int, planted: str) -> list[list[float]]:
    """Run on a rank; its resources after each rotation."""
    problem = Problem(size=dist.get_world_size(), heads=4, kv_heads=4, head_dim=16, seq_length=64, dtype=torch.float32)
    able = [setup for setup in setups((), problem, Options()) if setup.reason is None]
    samples, kept = [], list[Any]()
    for _ in range(ceil(steps / (STEPS_A_TURN * len(able)))):
        for setup in able:
            _turn(setup, planted == "groups")
            if planted == "descriptors":
                kept.append(os.open(os.devnull, os.O_RDONLY))
            if planted == "memory":
                kept.append(bytearray(b"x" * (1 << 20)))
        gc.collect()
        samples.append(resources())
    return samples


def _turn(setup: Setup, keep: bool) -> None:
    axes = setup.axes
    mesh = GroupMesh(axes, _groups(axes, setup), dist.get_rank())
    cp = ContextParallel(setup, mesh=mesh)
    whole = shapes(setup.problem, setup.problem.seq_length)
    shards = Inputs(*(None if y is None else torch.rand(y.shape) - 0.5 for y in whole)).sharded(cp, torch.device("cpu"))
    for _ in range(STEPS_A_TURN):
        call_through_autograd(cp, shards, setup.problem)
    dist.barrier()
    for group in mesh.groups.values() if not keep else ():
        dist.destroy_process_group(group)


def _groups(axes: dict[str, int], setup: Setup) -> dict[str, dist.ProcessGroup]:
    """Created by all ranks: with ``use_local_synchronization`` torch reuses names of destroyed groups, whose addresses
    a rank may then read."""
    groups = {}
    for name, lists in axis_groups(range(dist.get_world_size()), axes, setup.provider.extra_groups).items():
        for ranks in lists:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[name] = group
    return groups


def grown(samples: list[list[float]]) -> dict[str, float]:
    """Resource -> growth."""
    third = max(1, len(samples) // 3)
    middle, last = samples[-2 * third : -third] or samples[:1], samples[-third:]
    means = [[mean(values) for values in zip(*part, strict=True)] for part in (middle, last)]
    return {name: after - before for name, before, after in zip(BOUNDS, *means, strict=True)}


def main(
    steps: Annotated[int, typer.Option(min=1, help="attention calls, forward and backward")] = 150,
    ranks: Annotated[int, typer.Option(min=2, help="ranks")] = 4,
    plant: Annotated[str, typer.Option(help=f"a leak: {', '.join(PLANTS[1:])}")] = "",
) -> None:
    if plant not in PLANTS:
        raise typer.BadParameter(f"--plant {plant}: choose one of {', '.join(PLANTS[1:])}")
    torch.set_num_threads(1)
    try:
        every = run_ranks(soak, ranks, args=(steps, plant), timeout=None, init_process_group=True)
    except RankError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    bad = False
    for rank, samples in enumerate(every):
        for name, growth in grown(samples).items():
            bad |= (grew := growth > BOUNDS[name])
            if rank == 0 or grew:
                print(f"rank {rank}: {name}: {growth:+.1f}, at most {BOUNDS[name]:+.1f}: {'GREW' if grew else 'ok'}")
    print(
        f"{steps} steps on {ranks} ranks, {len(every[0])} rotations of all providers: {'LEAK' if bad else 'no growth'}"
    )
    raise typer.Exit(bad)


if __name__ == "__main__":
    typer.run(main)
