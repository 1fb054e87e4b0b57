"""A virtual cluster's network on one Linux machine: a namespace per network card, joined by links of a given rate.

    one card per node                               one card per rank

    node 0 [ rank 0  rank 1 ]---slow---+            node 0 [ rank 0 ]---slow---+
             loopback inside          core                 [ rank 1 ]---slow---+
    node 1 [ rank 2  rank 3 ]---slow---+                     fast bridge      core
                                                    node 1 [ rank 2 ]---slow---+ ...

A *station* is one network namespace: a node, or a rank with its own card. Slow links are shaped at both ends (``htb``),
so sending and receiving are limited alike, with queues long enough to drop nothing, as on a lossless fabric. Ranks of
one node talk over loopback, or over an unshaped bridge of their node: a rank then has one address, on its fast link,
and a route over the slow one to everything outside its node.

All links live inside these namespaces and neighbours are static, so the machine's own network is not touched: no
interface, no sysctl. Deleting the namespaces removes everything.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from iproute import batch, missing, packets, shaping

from cp_plugin.tools.flags import errors_in_one_line

_NAMESPACES = Path("/run/netns")
_OURS = re.compile(r"cpp-(\d+)-(\d+)-")  # cpp-<process id>-<its start time>-<station>
_WINDOW = f"4096 {8 << 20} {32 << 20}"
"""Bytes of a receiver's window: minimum, initial, maximum. Bare acknowledgements overtake data here, and TCP drops data
with an acknowledgement older than a window, then stalls for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """``nodes`` nodes of ``ranks_per_node`` ranks, numbered node by node; at most 250 of each."""

    nodes: int
    ranks_per_node: int = 1
    nic: Literal["rank", "node"] = "rank"
    """Which has its own slow link."""

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cards(self) -> int:
        """Slow links per node."""
        return self.ranks_per_node if self.nic == "rank" else 1

    @property
    def stations(self) -> list[tuple[int, int]]:
        """(node, card) of every namespace."""
        return [(node, card) for node in range(self.nodes) for card in range(self.cards)]

    @property
    def bridged(self) -> bool:
        """Whether a fast bridge joins the ranks of a node; otherwise they share a namespace, or are alone."""
        return self.cards > 1

    def station(self, rank: int) -> tuple[int, int]:
        """The (node, card) of a rank."""
        node, local = divmod(rank, self.ranks_per_node)
        return node, local if self.nic == "rank" else 0

    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's node."""
        return tuple(f"node{rank // self.ranks_per_node}" for rank in range(self.size))

    def address(self, rank: int) -> str:
        """The address at which all ranks reach a rank."""
        node, card = self.station(rank)
        return _address(node, card)


class Network:
    """The namespaces and links of one topology; a context manager."""

    def __init__(self, topology: Topology, rate: int) -> None:
        """rate: bits per second of each slow link, each way. ValueError on an unsuitable machine."""
        if reason := missing():
            raise ValueError(reason)
        self.topology = topology
        self.rate = rate
        self._shaped = False
        self._prefix = f"cpp-{os.getpid()}-{_start_time(os.getpid())}-"

    def __str__(self) -> str:
        """``4 nodes x 4, a slow link per rank, 20 Mbit/s``."""
        t = self.topology
        links = f", a slow link per {t.nic}" if t.ranks_per_node > 1 else ""
        return f"{t.nodes} nodes x {t.ranks_per_node}{links}, {self.rate / 1e6:.4g} Mbit/s"

    def __enter__(self) -> Self:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything this network created and wait until it is gone, with signals blocked."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            _delete([name for name in _names() if name.startswith(self._prefix)])
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def enter(self, rank: int) -> str:
        """Move the calling thread and its future threads into a rank's namespace; returns Gloo's interface."""
        fd = os.open(_NAMESPACES / self._name(*self.topology.station(rank)), os.O_RDONLY)
        try:
            os.setns(fd, os.CLONE_NEWNET)
        finally:
            os.close(fd)
        Path("/proc/sys/net/ipv4/tcp_rmem").write_text(_WINDOW)  # of this namespace
        return "fast" if self.topology.bridged else "slow"

    def shape(self, rate: int) -> None:
        """Change the rate of every slow link, in bits per second."""
        commands: dict[str, list[list[str]]] = {}
        for node, card in self.topology.stations:
            peers = [_address(*station) for station in self.topology.stations if station[0] != node]
            ends = ((self._name(node, card), "slow", "dst"), (self._core, _port(node, card), "src"))
            for namespace, link, field in ends:
                lines = [f"qdisc del dev {link} root"] if self._shaped else []
                lines += [line.format(link) for line in shaping(rate, field, peers)]
                ip, tc = commands.setdefault(namespace, [[], []])
                ip.append(packets(rate).format(link))
                tc.extend(lines)
        for namespace, (ip, tc) in commands.items():
            batch("ip", ip, namespace)
            batch("tc", tc, namespace)
        self.rate, self._shaped = rate, True

    def cut(self, rank: int) -> None:
        """Take the slow link of a rank's station down without notice."""
        batch("ip", ["link set dev slow down"], self._name(*self.topology.station(rank)))

    def _build(self) -> None:
        t = self.topology
        names = [self._core, *(self._name(*station) for station in t.stations)]
        batch("ip", [f"netns add {name}" for name in names])
        bridges = ["core", *(f"node{n}" for n in range(t.nodes) if t.bridged)]
        batch(
            "ip",
            [f"link add {b} type bridge forward_delay 0 mcast_snooping 0" for b in bridges]
            + [f"link set dev {b} addrgenmode none up" for b in bridges],
            self._core,
        )
        for node, card in t.stations:
            self._connect(node, card, "slow", "core")
            if t.bridged:
                self._connect(node, card, "fast", f"node{node}")
            batch("ip", self._addressing(node, card), self._name(node, card))
        self.shape(self.rate)

    def _connect(self, node: int, card: int, link: str, bridge: str) -> None:
        """Create ``link`` in the station and its port on ``bridge`` in the core namespace."""
        port = _port(node, card, link)
        end = f"{link} netns {self._name(node, card)} address {_mac(node, card, link)}"
        batch("ip", [f"link add {end} type veth peer name {port} netns {self._core}"])
        batch("ip", [f"link set dev {port} addrgenmode none master {bridge} up"], self._core)

    def _addressing(self, node: int, card: int) -> list[str]:
        t = self.topology
        own = _address(node, card)
        lines = ["link set dev lo up", "link set dev slow addrgenmode none up"]
        if t.bridged:
            lines += ["link set dev fast addrgenmode none up", f"addr add {own}/24 dev fast"]
        else:
            lines += [f"addr add {own}/32 dev slow"]
        lines += [f"route add 10.77.0.0/16 dev slow scope link src {own} rto_min 2s"]
        for other, its in t.stations:
            link = "fast" if other == node else "slow"
            if (other, its) != (node, card):
                mac = _mac(other, its, link)
                lines += [f"neigh add {_address(other, its)} lladdr {mac} dev {link} nud permanent"]
        return lines

    @property
    def _core(self) -> str:
        return f"{self._prefix}core"

    def _name(self, node: int, card: int) -> str:
        return f"{self._prefix}n{node}c{card}"


def remove_stale() -> list[str]:
    """Remove and name namespaces left by runs that were killed."""
    owners = {name: _OURS.match(name) for name in _names()}
    stale = [name for name, owner in owners.items() if owner and _start_time(int(owner[1])) != int(owner[2])]
    _delete(stale)
    return stale


@contextmanager
def command() -> Iterator[None]:
    """Run a command: errors are reported as by ``cp-plugin``, and networks are removed however it ends, by signals
    too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    torch.set_num_threads(1)  # ranks are forked from this process, and OpenMP's pool does not survive a fork
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with errors_in_one_line():
            yield
    except KeyboardInterrupt:
        print("interrupted; the cluster is removed", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _delete(names: Sequence[str]) -> None:
    if not names:
        return
    batch("ip", [f"netns del {name}" for name in names], force=True)
    deadline = time.monotonic() + 10
    while left := set(names) & set(_names()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"these network namespaces could not be removed: {', '.join(sorted(left))}")
        time.sleep(0.05)


def _names() -> list[str]:
    return sorted(path.name for path in _NAMESPACES.glob("cpp-*")) if _NAMESPACES.exists() else []


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])


def _port(node: int, card: int, link: str = "slow") -> str:
    return f"{link[0]}{node}.{card}"


def _address(node: int, card: int) -> str:
    return f"10.77.{node}.{card + 1}"


def _mac(node: int, card: int, link: str) -> str:
    return f"02:00:00:{0 if link == 'slow' else 1:02x}:{node:02x}:{card + 1:02x}"
