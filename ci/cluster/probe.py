"""How fast the links are: plain TCP streams between ranks, without torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

from network import Network

from cp_plugin.testing.launch import run_ranks

_PORT = 5000
_CONNECT_S = 10.0


def stream(network: Network, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[float]:
    """Send ``nbytes`` from the first to the second rank of all pairs at the same time; bits per second of each."""

    def end() -> float:
        pair, sending = divmod(int(os.environ["RANK"]), 2)
        source, target = pairs[pair]
        network.enter(source if sending else target)
        address = (network.topology.address(target), _PORT + pair)
        return _send(address, nbytes) if sending else _receive(address, nbytes)

    return [8 * nbytes / seconds for seconds in run_ranks(end, 2 * len(pairs), timeout=60)[::2]]


def describe(network: Network) -> str:
    """What two streams get, inside a node and between two, in a sentence."""
    t, found = network.topology, []
    if t.ranks_per_node > 1:
        found += [f"{stream(network, [(0, 1)], 20_000_000)[0] / 1e9:.2g} Gbit/s inside a node"]
    if t.nodes > 1:
        between = stream(network, [(0, t.ranks_per_node)], max(100_000, (network.rate or 10**9) // 8))[0]
        found += [f"{between / 1e6:.3g} Mbit/s between nodes"]
    return f"one TCP stream gets {', '.join(found)}" if found else "one rank: no links"


def _receive(address: tuple[str, int], nbytes: int) -> float:
    """Seconds from the connection to the last byte."""
    with socket.create_server(address) as server:
        connection, _ = server.accept()
        start = time.perf_counter()
        with connection:
            while nbytes > 0:
                chunk = connection.recv(1 << 20)
                if not chunk:
                    raise ConnectionError(f"the stream to {address} ended {nbytes} bytes early")
                nbytes -= len(chunk)
        return time.perf_counter() - start


def _send(address: tuple[str, int], nbytes: int) -> float:
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            with socket.create_connection(address) as connection:
                connection.sendall(bytes(nbytes))
                return 0.0
        except ConnectionRefusedError:  # nobody listens yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
