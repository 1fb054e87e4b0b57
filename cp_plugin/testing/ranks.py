"""Where a command's ranks come from: torchrun started them, or they are forked here, if the machine can run them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from cp_plugin.engine.comm.every_rank import gather_hosts
from cp_plugin.engine.common.text import show_bytes
from cp_plugin.engine.core.problem import Problem
from cp_plugin.testing.launch import run_ranks


def is_under_torchrun() -> bool:
    """Return True if this process was started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return True if this process reports for all ranks: it forks them, or is rank 0."""
    return os.environ.get("RANK", "0") == "0"


def with_progress[T](items: Sequence[T], doing: str) -> Iterable[T]:
    """The items, with a progress bar on the terminal of the reporting process."""
    if not is_first() or not sys.stderr.isatty():
        return items
    from rich.console import Console  # absent where only torch is installed
    from rich.progress import track

    return track(items, doing, console=Console(stderr=True), transient=True)


def number_of_ranks(ranks: int | None) -> int:
    """torchrun's number of ranks, or ``--ranks``, or 4; ValueError for both."""
    if not is_under_torchrun():
        return 4 if ranks is None else ranks
    if ranks is not None:
        raise ValueError(
            f"--ranks {ranks}: torchrun has already started {os.environ['WORLD_SIZE']} ranks; leave --ranks out"
        )
    return int(os.environ["WORLD_SIZE"])


def start(device: str, ranks: int) -> torch.device | None:
    """Join the other ranks under torchrun; None where ranks are to be forked. ValueError for more ranks than CUDA
    devices.

    device: ``cpu`` or ``cuda``.
    """
    devices = torch.cuda.device_count()
    if is_under_torchrun():
        if device == "cuda" and int(os.environ.get("LOCAL_RANK", 0)) >= devices:
            raise ValueError(
                f"every rank needs a CUDA device, but this machine has {devices}; start fewer ranks, or use --device "
                "cpu"
            )
        return join(device)
    if device == "cuda" and ranks > devices:
        raise ValueError(
            f"--ranks {ranks}: this machine has {devices} CUDA devices; use --ranks {devices}, or --device cpu"
        )
    return None


def run[T](
    fn: Callable[[torch.device], T], size: int, device: str, timeout: float, joined: torch.device | None = None
) -> T:
    """Call a function on all ranks, each with its device, and return its result, which is the same on all of them;
    RankError if a forked rank fails.

    Args:
        device: ``cpu`` or ``cuda``.
        timeout: seconds for forked ranks.
        joined: from ``start``: this rank's device; None: ranks are forked.
    """
    return fn(joined) if joined is not None else run_ranks(lambda: fn(join(device)), size, timeout=timeout)[0]


def join(device: str) -> torch.device:
    """Initialise torch.distributed on this rank, started or forked, and return its device."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=local)
    return local


def hosts(size: int) -> tuple[str, ...]:
    """The host of every rank: gathered if they have joined, else this one, where they will be forked."""
    return gather_hosts() if dist.is_initialized() else (socket.gethostname(),) * size


_FLOPS = 2e9
"""FLOP/s of one CPU core in attention, conservatively."""
_RANK_BYTES = 50_000_000
"""Memory of a forked rank besides its tensors."""
_MOST_SECONDS = 600.0


def refuse_too_large(problem: Problem, runs: int, *, reference: bool = False) -> float:
    """An upper bound of the seconds that ``runs`` forward and backward passes take on this machine's CPU; ValueError if
    they need more memory than is free, or more than ten minutes.

    reference: whether one head's scores are also computed whole, in float64.
    """
    import psutil  # absent where only torch is installed

    sizes = {"ranks": problem.size, "seq-length": problem.seq_length, "heads": problem.heads}
    sizes |= {"head-dim": problem.head_dim, "batch": problem.batch}
    shapes = " ".join(f"--{name} {size}" for name, size in sizes.items())
    whole = problem.size * (problem.q_elements + problem.out_elements + problem.kv_elements)
    # each rank holds inputs, gradients, the gathered sequence, and float32 sums of it
    needed = problem.size * (_RANK_BYTES + whole * (problem.dtype.itemsize + problem.wide))
    needed, free = needed + (6 * 8 * problem.seq_length**2 if reference else 0), psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"{shapes}: this needs up to {show_bytes(needed)} of memory, but {show_bytes(free)} is free: use a smaller "
            "--seq-length, or fewer ranks or heads"
        )
    pairs = problem.seq_length**2 * problem.batch * problem.heads * (problem.head_dim + problem.v_head_dim)
    seconds = 7 * pairs * runs / _FLOPS / (psutil.cpu_count(logical=False) or 1)
    if seconds > _MOST_SECONDS:
        raise ValueError(
            f"{shapes}: running this would take {seconds / 60:.0f} minutes or so on this machine's CPU, but at most "
            f"{_MOST_SECONDS / 60:.0f} are allowed: use a smaller --seq-length, or fewer heads or providers"
        )
    return seconds
