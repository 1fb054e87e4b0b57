"""GatherQ alone: queries are gathered, keys and values stay.

    0: q0 q1 q2 x kv0     every rank attends all queries to its own keys; partial outputs go back to the rank
    1: q0 q1 q2 x kv1     of the query, which merges them
    2: q0 q1 q2 x kv2

The mirror image of all_gather. It pays where keys and values are larger than queries and outputs; that is rare, so
this is an example and not a built-in method.
"""

from __future__ import annotations

from dataclasses import replace

from cp_plugin import Options, Problem, Provider
from cp_plugin.engine.comm import Mesh
from cp_plugin.engine.core.options import Option, whole_number
from cp_plugin.engine.core.spelling import spelled
from cp_plugin.engine.methods.gather import GatherQ
from cp_plugin.engine.methods.moves import Moved
from cp_plugin.engine.methods.protocol import Attend, Choice, Formula


def _axes(size: int, options: Options) -> dict[str, int]:
    return {"cp": size}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Moved((GatherQ(mesh, "cp"),), local, groups=options.q_groups or 1)


def _choose(problem: Problem, options: Options) -> Choice:
    """Two groups, unless the user says otherwise, so that one is gathered while the other is attended."""
    if options.q_groups is not None or problem.kv_heads % 2:
        return Choice(options)
    return Choice(replace(options, q_groups=2), ("two groups of heads: messages of one hide behind the other's work",))


def _unsupported(problem: Problem, options: Options) -> str | None:
    groups = options.q_groups or 1
    if problem.kv_heads % groups:
        return f"{spelled(Q_GROUPS, groups)} does not divide the {problem.kv_heads} key/value heads of a rank"
    return None


def _traffic(problem: Problem, options: Options, index: int) -> Formula:
    """Forward: q out, (out, lse) back. Backward: q, dout, lse, delta out, dq back in the accumulation dtype."""
    if problem.size == 1:
        return {}
    others = problem.size - 1
    q_and_out = problem.q_bytes + problem.out_bytes
    return {
        ("forward", "cp"): others * (q_and_out + problem.row_bytes),
        ("backward", "cp"): others * (q_and_out + 2 * problem.row_bytes + problem.q_elements * problem.wide),
    }


Q_GROUPS = Option(
    "q_groups",
    metavar="N",
    meaning="groups of heads whose queries are gathered while others are attended",
    default="2, if the number of key/value heads is even",
    read=whole_number,
    write="a number of groups, such as 2",
    near=lambda ranks, groups: (1, 2, 4),
)
PROVIDER = Provider(
    name="gather_q",
    summary="a worked example: queries are gathered, keys and values stay",
    layouts=("striped", "zigzag", "contiguous"),
    axes=_axes,
    build=_build,
    choose=_choose,
    options=(Q_GROUPS,),
    unsupported=_unsupported,
    traffic=_traffic,
)
