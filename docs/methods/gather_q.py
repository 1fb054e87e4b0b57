"""GatherQ alone: queries are gathered, keys and values stay.

    0: q0 q1 q2 x kv0     every rank attends all queries to its own keys; partial outputs go back to the rank
    1: q0 q1 q2 x kv1     of the query, which merges them
    2: q0 q1 q2 x kv2

The mirror image of all_gather. It pays where keys and values are larger than queries and outputs; that is rare, so
this is an example and not a built-in method.
"""

from __future__ import annotations

from cp_plugin import Options, Problem, Provider
from cp_plugin.comm import Mesh
from cp_plugin.methods.gather import GatherQ
from cp_plugin.methods.moves import Moved
from cp_plugin.methods.protocol import Attend, Formula


def _axes(size: int, options: Options) -> dict[str, int]:
    return {"cp": size}


def _build(mesh: Mesh, local: Attend, problem: Problem, options: Options) -> Attend:
    return Moved((GatherQ(mesh, "cp"),), local)


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


PROVIDER = Provider(
    name="gather_q",
    summary="a worked example: queries are gathered, keys and values stay",
    layouts=("striped", "zigzag", "contiguous"),
    axes=_axes,
    build=_build,
    traffic=_traffic,
)
