"""Ranks inside a virtual cluster: forked, moved into their namespaces, joined by Gloo over the cluster's links."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from network import Network

from cp_plugin.testing.launch import run_ranks

_PORT = 5000
_CONNECT_S = 10.0


def run_in(network: Network, fn: Callable[[], Any], *, timeout: float) -> list[Any]:
    """Call ``fn`` as every rank of the network, with torch.distributed initialised; results in rank order.

    Raises RankError or RankTimeout as ``run_ranks`` does.
    """

    def rank() -> Any:
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # the store connects before the rank enters its namespace, so its traffic is not on the links
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        os.environ["GLOO_SOCKET_IFNAME"] = network.enter(number)
        dist.init_process_group("gloo", store=store, rank=number, world_size=size)
        return fn()

    return run_ranks(rank, network.topology.size, timeout=timeout)


def sent_bytes() -> int:
    """Bytes sent over this rank's slow link so far, headers and acknowledgements included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        link, _, counts = line.partition(":")
        if link.strip() == "slow":
            return int(counts.split()[8])
    raise RuntimeError("this process is in no station of a virtual cluster: it has no link called 'slow'")


def stream(network: Network, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[float]:
    """Send ``nbytes`` over TCP from the first to the second rank of all pairs at once; bits per second of each."""
    together = multiprocessing.get_context("fork").Barrier(2 * len(pairs), timeout=_CONNECT_S)

    def end() -> float:
        pair, sending = divmod(int(os.environ["RANK"]), 2)
        source, target = pairs[pair]
        network.enter(source if sending else target)
        address = (network.topology.address(target), _PORT + pair)
        with _connected(address) if sending else _accepted(address) as connection:
            together.wait()  # on a busy machine streams would not overlap otherwise
            start = time.perf_counter()
            if sending:
                connection.sendall(bytes(nbytes))
            else:
                _receive(connection, nbytes)
            return time.perf_counter() - start

    return [8 * nbytes / seconds for seconds in run_ranks(end, 2 * len(pairs), timeout=60)[::2]]


def describe(network: Network) -> str:
    """The speed of a TCP stream within a node and between two, as a sentence."""
    t, found = network.topology, []
    if t.ranks_per_node > 1:
        found += [f"{stream(network, [(0, 1)], 20_000_000)[0] / 1e9:.2g} Gbit/s inside a node"]
    if t.nodes > 1:
        between = stream(network, [(0, t.ranks_per_node)], max(100_000, (network.rate or 10**9) // 8))[0]
        found += [f"{between / 1e6:.3g} Mbit/s between nodes"]
    return f"one TCP stream gets {', '.join(found)}" if found else "one rank: no links"


def _accepted(address: tuple[str, int]) -> socket.socket:
    with socket.create_server(address) as server:
        return server.accept()[0]


def _connected(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:  # the receiver does not listen yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _receive(connection: socket.socket, nbytes: int) -> None:
    while nbytes > 0:
        chunk = connection.recv(1 << 20)
        if not chunk:
            raise ConnectionError(f"the stream ended {nbytes} bytes early")
        nbytes -= len(chunk)
