"""Inference of the current cluster without measuring.

The GPU gives its name, the launcher the ranks per node; the network is that of the packaged cluster with such nodes,
and does not matter on a single node. Anything uncertain is an error, never a guess.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from cp_plugin.planner.machine.hardware import Cluster, clusters, override

GPUS = {
    "A100-SXM4-40GB": "a100-40gb-sxm",
    "A100-SXM4-80GB": "a100-80gb-sxm",
    "A100 80GB PCIe": "a100-80gb-pcie",
    "A800-SXM4-80GB": "a800-80gb-sxm",
    "H100 80GB HBM3": "h100-80gb-sxm",
    "H200": "h200-141gb-sxm",
    "B200": "b200-180gb-sxm",
}
"""CUDA device name without the vendor -> packaged device. Others of the family (NVL, GH200) differ in memory, clocks or
links."""
CPU = "cpu"


class Inferred(NamedTuple):
    cluster: Cluster
    how: str


def here(flag: str, ranks: int, *, cpu: bool) -> Inferred:
    """The cluster of this process; ValueError as for ``cluster_of``.

    Args:
        flag: that names a cluster explicitly, for messages.
        ranks: of the whole training.
    """
    local = local_ranks(os.environ, 1 if cpu else torch.cuda.device_count(), ranks)
    return cluster_of(CPU if cpu else torch.cuda.get_device_name(), local, ranks, flag)


def local_ranks(environment: Mapping[str, str], seen: int, ranks: int) -> int:
    """Ranks per node: from the launcher, or the number of devices."""
    return int(environment.get("LOCAL_WORLD_SIZE") or min(max(seen, 1), ranks))


def cluster_of(gpu: str, per_node: int, ranks: int, flag: str) -> Inferred:
    """The packaged cluster with that GPU and number of ranks per node; ValueError for an unknown GPU, and for several
    nodes of an unknown size, with the clusters to choose from."""
    name = gpu.removeprefix("NVIDIA ")
    device = CPU if gpu == CPU else GPUS.get(name)
    choices = f"{flag} with one of {', '.join(clusters())}, or with a file that cp-plugin calibrate wrote"
    if device is None:
        raise ValueError(f"no profile for the GPU {gpu!r} (there are profiles for {', '.join(GPUS)}): use {choices}")
    having = [c for c in clusters().values() if c.device.name == device]
    how = f"{gpu} and {per_node} rank{'s' if per_node > 1 else ''} per node"
    alike = [c for c in having if c.per_node == per_node]
    if len(alike) == 1:
        return Inferred(alike[0], f"{alike[0].name}, inferred from {how}")
    if having and (ranks <= per_node or gpu == CPU):
        nearest = min(having, key=lambda c: (c.per_node < per_node, c.per_node))
        changed = override(nearest, per_node=per_node, nics=min(nearest.nics, per_node))
        return Inferred(changed, f"{nearest.name} with {per_node} per node, inferred from {how}")
    known = ", ".join(f"{c.name} has {c.per_node} per node" for c in having) or "no packaged cluster has these GPUs"
    raise ValueError(f"{how}: the network is unknown ({known}): use {choices}")
