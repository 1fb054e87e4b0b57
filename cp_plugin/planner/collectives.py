"""Seconds of the collectives around attention: of tensor, expert, data and pipeline parallelism.

Ranks of a group are ``stride`` apart. Nodes hold neighbouring ranks, and all groups communicate at the same time: a
node's network cards are shared by all groups that leave it. Within a node a rank sends over its own link.
"""

from __future__ import annotations

from math import ceil, log2
from typing import NamedTuple

from cp_plugin.planner.hardware import Cluster, Link, Verb


class Group(NamedTuple):
    """Ranks that communicate."""

    size: int
    stride: int = 1


def ring(cluster: Cluster, group: Group, nbytes: float, verb: Verb) -> float:
    """An all-gather to, or a reduce-scatter from, ``nbytes`` on each rank.

    Every rank passes on all of it but its own part; a ring leaves each node once. Latency: of as many steps as a tree
    has levels, which NCCL uses where latency matters.
    """
    if group.size == 1:
        return 0.0
    sent = nbytes * (group.size - 1) / group.size
    measured = cluster.collectives.get(verb)
    if measured is not None:
        return measured.latency_s + sent / measured.bytes_per_s
    steps = ceil(log2(group.size))
    inside = _members(cluster, group)
    if inside == group.size:
        return steps * cluster.intra.latency_s + sent / cluster.intra.bytes_per_s
    leaving = min(group.stride, cluster.per_node)  # groups on one node
    rate = cluster.nics * cluster.inter.bytes_per_s / leaving
    if inside > 1:
        rate = min(rate, cluster.intra.bytes_per_s)
    return steps * cluster.inter.latency_s + sent / rate


def all_reduce(cluster: Cluster, group: Group, nbytes: float) -> float:
    """A reduce-scatter, and an all-gather."""
    return ring(cluster, group, nbytes, "reduce_scatter") + ring(cluster, group, nbytes, "all_gather")


def all_to_all(cluster: Cluster, group: Group, nbytes: float) -> float:
    """Every rank has ``nbytes``, in equal parts for the ranks of its group."""
    if group.size == 1:
        return 0.0
    measured = cluster.collectives.get("all_to_all")
    if measured is not None:
        return measured.latency_s + nbytes * (group.size - 1) / group.size / measured.bytes_per_s
    inside = _members(cluster, group)
    within = nbytes * (inside - 1) / group.size / cluster.intra.bytes_per_s
    if inside == group.size:
        return cluster.intra.latency_s + within
    outside = nbytes * (group.size - inside) / group.size / _share(cluster).bytes_per_s
    return cluster.inter.latency_s + max(within, outside)


def message(cluster: Cluster, stride: int, nbytes: float) -> float:
    """From every rank to the one ``stride`` further."""
    link = cluster.intra if stride < cluster.per_node else _share(cluster)
    return link.latency_s + nbytes / link.bytes_per_s


def _share(cluster: Cluster) -> Link:
    """What one device has of its node's network cards when all use them."""
    rate = cluster.inter.bytes_per_s * cluster.nics / cluster.per_node
    return Link(latency_s=cluster.inter.latency_s, bytes_per_s=rate)


def _members(cluster: Cluster, group: Group) -> int:
    """Ranks of a group that share a node."""
    return max(1, min(group.size, cluster.per_node // group.stride))
