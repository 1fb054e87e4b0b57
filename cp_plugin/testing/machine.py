"""What this machine can run: refuse before forking ranks that would run out of memory or take too long."""

from __future__ import annotations

from cp_plugin.common.text import in_bytes
from cp_plugin.core.problem import Problem

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
    needed, free = (
        _bytes(problem) + (6 * 8 * problem.seq_length**2 if reference else 0),
        psutil.virtual_memory().available,
    )
    if needed > free:
        raise ValueError(
            f"{shapes}: this needs up to {in_bytes(needed)} of memory, but {in_bytes(free)} is free: use a smaller "
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


def _bytes(problem: Problem) -> int:
    """Memory of all ranks, if each holds inputs, gradients, the gathered sequence, and float32 sums of it."""
    whole = problem.size * (problem.q_elements + problem.out_elements + problem.kv_elements)
    return problem.size * (_RANK_BYTES + whole * (problem.dtype.itemsize + problem.wide))
