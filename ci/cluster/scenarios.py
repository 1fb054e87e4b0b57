"""Scenarios: a cluster, an attention problem, contestants, and targets.

All are bound by the links: the ranks share this machine's few cores, so rates are low and sequences short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import packs
import torch
from network import Topology

from cp_plugin import Options, Problem
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.methods import registry as providers

_UNITS = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3}
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error of a contestant's results."""
DTYPES = {dtype_name(dtype): dtype for dtype in ALLOWED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``fast`` must take at most 1 / ``at_least`` of the time of ``slow``; both from ``Scenario.runs``."""

    fast: str
    slow: str
    at_least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One table; all runs are compared with the first."""

    nodes: int
    ranks_per_node: int = 1
    nic: Literal["rank", "node"] = "rank"
    rate: str
    seq: int
    heads: int
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = True
    window: int | None = None
    """Number of previous tokens that a token sees; None: all."""
    documents: str | None = None
    """Kind of packed documents, as in ``ci/perf/placement.py``; runs then name their placement (``packs``)."""
    apart: bool = False
    """A barrier between forward and backward: a rank that waits would otherwise lend its processor to the backward of
    others, which no device does."""
    runs: tuple[str, ...]
    targets: tuple[Target, ...] = ()

    def topology(self) -> Topology:
        """Nodes and cards; ValueError naming the wrong flag."""
        return Topology(nodes=self.nodes, ranks_per_node=self.ranks_per_node, nic=self.nic)

    def problem(self) -> Problem:
        """The attention call; ValueError naming the wrong flag."""
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        topology = self.topology()
        if self.seq % (2 * topology.size):
            raise ValueError(f"--seq {self.seq} must be a multiple of {2 * topology.size}, twice the number of ranks")
        return Problem(
            size=topology.size,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim,
            seq_length=self.seq,
            dtype=DTYPES[self.dtype],
            causal=self.causal,
            window=None if self.window is None else (self.window, 0),
            documents=self.documents is not None,
        ).with_transport(hosts=topology.hosts())

    def bounds(self) -> tuple[int, ...]:
        """Bounds of the documents; empty: one document."""
        return packs.on_cluster(self.documents, self.nodes * self.ranks_per_node, self.seq) if self.documents else ()

    def entries(self) -> list[Entry]:
        """The contestants; ValueError with the reason of one that cannot run."""
        parse = Entry.parse if self.documents is None else packs.OnPack.parse
        entries, problem = [parse(run, "--run") for run in self.runs], self.problem()
        for entry in entries:
            if entry.provided:
                resolved = providers.settle(entry.name, problem, Options(**dict(entry.options)))
                if reason := providers.unsupported(resolved.provider, problem, resolved.options):
                    raise ValueError(f"--run {entry}: {reason}")
        if len({entry.kind for entry in entries}) > 1:
            raise ValueError(f"--run: softmax and linear attention in one table: {', '.join(map(str, entries))}")
        if len({str(entry) for entry in entries}) < len(entries):
            raise ValueError(f"--run: every contestant once, not {', '.join(map(str, entries))}")
        return entries


def parse_rate(text: str) -> int:
    """``50mbit`` in bits per second; ValueError otherwise."""
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            number = text.removesuffix(unit)
            if number.replace(".", "", 1).isdecimal() and float(number) * factor >= 10_000:
                return int(float(number) * factor)
    raise ValueError(f"--rate {text}: give a rate of 10kbit or more, such as 50mbit or 1gbit")


_HOP = "hops=p2p"  # upstream's own hops take longer on 64 Gloo ranks than the links do, see torch_ring
_TORCH = (f"torch-ring:rotate=alltoall,{_HOP}", f"torch-ring:rotate=allgather,{_HOP}")
_BASELINES = ("ring", *_TORCH, "all_gather", "usp")
_NODES = ("ring", "attention2d", "double_ring", "burst", *_TORCH)


def _must_beat(fast: str, *others: str, at_least: float = 1.0) -> tuple[Target, ...]:
    return tuple(Target(fast=fast, slow=other, at_least=at_least) for other in others)


def _slow_and_fast(name: str, at_least: float, **given: Any) -> dict[str, Scenario]:
    """``name`` on slow links, where the first run must be ``at_least`` times as fast as the others, and ``name-fast``,
    where it must not be slower."""
    rates = {name: ("20mbit", at_least), f"{name}-fast": ("1gbit", 1.0)}
    return {
        full: Scenario(nodes=16, rate=rate, **given, targets=_must_beat(*given["runs"], at_least=wanted))
        for full, (rate, wanted) in rates.items()
    }


_GROUPED = "attention2d:head_groups=2"  # 8 kB a group is nothing to most networks, and 50 ms on these links
_FLAT64 = {"nodes": 64, "rate": "1.25mbit", "seq": 2048, "dtype": "bfloat16"}
_LINEAR = {"nodes": 16, "heads": 2, "apart": True}
_CHAT = {"seq": 65536, "heads": 2, "kv_heads": 1, "head_dim": 32, "documents": "chat"}
_WINDOW = {"seq": 65536, "heads": 1, "head_dim": 32, "window": 1023}
_CONTIGUOUS = ("needed:layout=contiguous", "ring:layout=contiguous")
_ZIGZAG = ("ring:layout=zigzag", "all_gather:layout=contiguous")

SCENARIOS = {
    "flat64": Scenario(
        **_FLAT64,
        heads=8,
        head_dim=32,
        runs=(
            *("ring", _GROUPED, "attention2d:head_parallel=8", "usp:head_parallel=8", "all_gather"),
            *_TORCH,
        ),
        targets=(
            *_must_beat(_GROUPED, "ring", at_least=4.5),
            *_must_beat("attention2d:head_parallel=8", *_TORCH, "all_gather", "usp:head_parallel=8"),
        ),
    ),
    "flat64-few-heads": Scenario(
        **_FLAT64,
        heads=4,
        runs=("ring", "attention2d", "attention2d:head_parallel=4", "usp", "all_gather", *_TORCH),
        targets=_must_beat("attention2d", *_BASELINES),
    ),
    **{
        f"nodes4x4-nic-per-{nic}": Scenario(
            nodes=4,
            ranks_per_node=4,
            nic=nic,
            rate="20mbit",
            seq=4096,
            heads=4,
            runs=_NODES,
            targets=_must_beat("burst", "ring", at_least=wanted),
        )
        for nic, wanted in (("rank", 2.5), ("node", 1.15))
    },
    "linear16": Scenario(
        **_LINEAR, rate="2.5mbit", seq=524288, runs=("lasp1", "lasp2"), targets=_must_beat("lasp2", "lasp1")
    ),
    "linear16-quadratic": Scenario(
        **_LINEAR, rate="20mbit", seq=8192, runs=("linear_ring", "lasp2"), targets=_must_beat("lasp2", "linear_ring")
    ),
    **_slow_and_fast("chat16", 3.0, **_CHAT, runs=("needed@placed", "ring@zigzag", "ring@each", "all_gather@each")),
    **_slow_and_fast("window16", 5.0, **_WINDOW, runs=(*_CONTIGUOUS, *_ZIGZAG)),
}
