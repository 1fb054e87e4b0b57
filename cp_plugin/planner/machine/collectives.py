"""Collectives around attention: seconds for tensor, expert, data and pipeline parallelism.

Ranks of a group are ``stride`` apart; nodes hold neighbouring ranks, and all groups communicate at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.machine.hardware import Cluster, Verb
from cp_plugin.planner.machine.links import Links, place


class Group(NamedTuple):
    size: int
    stride: int = 1


def cost(cluster: Cluster, group: Group, nbytes: float, verb: Verb) -> float:
    """All-gather to, reduce-scatter from, or all-to-all of ``nbytes`` on each rank: all but its own part is sent."""
    n = group.size
    if n == 1:
        return 0.0
    post = Post(0, verb, "group", "group", nbytes * (n - 1) / n, 1, None, None)  # type: ignore[arg-type]
    return Links(cluster, {"group": n}, place(n, cluster, group.stride)).cost(post, 0).seconds


def all_reduce(cluster: Cluster, group: Group, nbytes: float) -> float:
    return cost(cluster, group, nbytes, "reduce_scatter") + cost(cluster, group, nbytes, "all_gather")


def message(cluster: Cluster, stride: int, nbytes: float) -> float:
    """Send from every rank to the one ``stride`` further."""
    inside = stride < cluster.per_node
    link = (cluster.intra if inside else cluster.inter).of("exchange")
    share = 1.0 if inside else cluster.nics / cluster.per_node
    return link.latency_s + nbytes / (link.bytes_per_s * share)
