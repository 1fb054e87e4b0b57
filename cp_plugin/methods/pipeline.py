"""Head groups: the option that pipelines a method's moves (``moves.Moved``), and its default."""

from __future__ import annotations

from dataclasses import replace

from cp_plugin.common.text import divisors
from cp_plugin.core.options import Option, Options, whole_number
from cp_plugin.core.problem import Problem
from cp_plugin.core.spelling import spelled
from cp_plugin.methods.moves import Moved

HEAD_GROUPS = Option(
    "head_groups",
    metavar="N",
    meaning="groups of heads; one group's messages overlap with another's computation",
    read=whole_number,
    write="a number of groups, such as 2",
    near=lambda ranks, groups: (1, 2, 4, 8),
)


def in_head_groups(groups: int | None, method: Moved) -> Moved:
    """The method, pipelined over this number of head groups; None: one."""
    return replace(method, groups=groups or 1)


def groups_do_not_divide(problem: Problem, options: Options) -> str | None:
    """Why the key/value heads cannot be divided into the groups asked for; None if they can."""
    groups = 1 if options.head_groups is None else options.head_groups
    if groups >= 1 and problem.kv_heads % groups == 0:
        return None
    return (
        f"{spelled('head_groups', groups)} does not divide the {problem.kv_heads} key/value heads of a rank: use one "
        f"of {divisors(problem.kv_heads)}"
    )


_LEAST_BYTES = {"nccl": 2**23, "gloo": 2**18}
"""Least bytes of a group's queries on one rank: smaller messages and kernels cost more than they hide. Measured on
virtual clusters for Gloo; an estimate for NCCL: a message of 8 MiB takes 0.2 ms at 50 GB/s, ten times the start of its
collective, and a kernel on as many queries fills a GPU."""


def best_groups(problem: Problem, most: int = 8) -> int:
    """The number of groups if the user names none."""
    whole = problem.q_bytes
    return max(
        n
        for n in range(1, most + 1)
        if problem.kv_heads % n == 0 and (n == 1 or whole >= n * _LEAST_BYTES[problem.network])
    )
