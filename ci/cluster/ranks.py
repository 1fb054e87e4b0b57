"""Ranks inside a virtual cluster: forked, moved into their namespaces, joined by Gloo over the cluster's links."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from network import Network

from cp_plugin.testing.launch import run_ranks


def run_in(network: Network, fn: Callable[[], Any], *, timeout: float) -> list[Any]:
    """Call ``fn`` as every rank of the network's topology, torch.distributed initialised; results in rank order.

    Raises RankError or RankTimeout as ``run_ranks`` does.
    """

    def rank() -> Any:
        _join(network)
        return fn()

    return run_ranks(rank, network.topology.size, timeout=timeout)


def sent_bytes() -> int:
    """Bytes that have left this rank's station over its slow link, headers and acknowledgements included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        link, _, counts = line.partition(":")
        if link.strip() == "slow":
            return int(counts.split()[8])
    raise RuntimeError("this process is in no station of a virtual cluster: it has no link called 'slow'")


def _join(network: Network) -> None:
    """The store's connection is made first and stays outside: its traffic is not on the links."""
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    os.environ["GLOO_SOCKET_IFNAME"] = network.enter(number)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
