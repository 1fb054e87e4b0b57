"""Scenarios: a cluster, an attention problem, contestants, and targets.

All are bound by the links: the ranks share this machine's few cores, so rates are low and sequences short.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from network import Topology

from cp_plugin import Problem
from cp_plugin.tools.bench.cases import CAUSAL, LENGTHS, PACKED, TOKENS, WINDOWED, with_mask
from cp_plugin.tools.bench.contestants import Entry

MBIT = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``fast`` must take at most 1 / ``at_least`` of the time of ``slow``; both from ``Scenario.runs``."""

    fast: str
    slow: str
    at_least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Topology):
    """One table, on a cluster of this topology."""

    rate: int
    """Bits per second of every slow link, each way."""
    seq: int
    heads: int
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    mask: str = CAUSAL
    apart: bool = False
    """A barrier between forward and backward: a rank that waits would otherwise lend its processor to the backward of
    others, which no device does."""
    runs: tuple[str, ...]
    targets: tuple[Target, ...] = ()

    def problem(self) -> Problem:
        """The attention call; packs are of chat-like documents."""
        problem = Problem(
            size=self.size,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim,
            seq_length=self.seq,
            dtype=self.dtype,
        ).with_transport(hosts=self.hosts())
        bounds = _chats(self.size, self.seq) if self.mask == PACKED else ()
        return with_mask(self.mask, problem, window=1023, bounds=bounds)

    def entries(self) -> list[Entry]:
        """The contestants."""
        return [Entry.parse(run, "--scenario") for run in self.runs]


def _chats(size: int, seq_length: int) -> tuple[int, ...]:
    """Bounds of the documents of a pack of ``TOKENS`` per rank, each divided by an integer and rounded to whole chunks
    of two tokens, of which a rank has two; the last document is cut off."""
    chunks, scale = 4 * size, TOKENS * size // seq_length
    lengths = [chunks * max(1, round(length / scale / chunks)) for length in LENGTHS["chat"].pack(TOKENS * size, 0)]
    inside = [end for end in accumulate(lengths, initial=0) if end < seq_length]
    return (*inside, seq_length)


_HOP = "hops=p2p"  # upstream's own hops take longer on 64 Gloo ranks than the links do, see torch_ring
_TORCH = (f"torch-ring:rotate=alltoall,{_HOP}", f"torch-ring:rotate=allgather,{_HOP}")
_BASELINES = ("ring", *_TORCH, "all_gather", "usp")
_NODES = ("ring", "attention2d", "double_ring", "burst", *_TORCH)


def _must_beat(fast: str, *others: str, at_least: float = 1.0) -> tuple[Target, ...]:
    return tuple(Target(fast=fast, slow=other, at_least=at_least) for other in others)


def _slow_and_fast(name: str, at_least: float, **fields: Any) -> dict[str, Scenario]:
    """``name`` on slow links, where the first run must be ``at_least`` times as fast as the others, and ``name-fast``,
    where it must not be slower."""
    rates = {name: (20 * MBIT, at_least), f"{name}-fast": (1000 * MBIT, 1.0)}
    return {
        full: Scenario(nodes=16, rate=rate, **fields, targets=_must_beat(*fields["runs"], at_least=wanted))
        for full, (rate, wanted) in rates.items()
    }


_GROUPED = "attention2d:head_groups=2"  # 8 kB a group is nothing to most networks, and 50 ms on these links
_FLAT64 = {"nodes": 64, "rate": 1_250_000, "seq": 2048, "dtype": torch.bfloat16}
_LINEAR = {"nodes": 16, "heads": 2, "apart": True}
_CHAT = {"seq": 65536, "heads": 2, "kv_heads": 1, "head_dim": 32, "mask": PACKED}
_WINDOW = {"seq": 65536, "heads": 1, "head_dim": 32, "mask": WINDOWED}
_PLACED = ("needed:layout=documents", "ring:layout=zigzag", "all_gather:layout=contiguous")
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
            rate=20 * MBIT,
            seq=4096,
            heads=4,
            runs=_NODES,
            targets=_must_beat("burst", "ring", at_least=wanted),
        )
        for nic, wanted in (("rank", 2.5), ("node", 1.15))
    },
    "linear16": Scenario(
        **_LINEAR, rate=2_500_000, seq=524288, runs=("lasp1", "lasp2"), targets=_must_beat("lasp2", "lasp1")
    ),
    "linear16-quadratic": Scenario(
        **_LINEAR, rate=20 * MBIT, seq=8192, runs=("linear_ring", "lasp2"), targets=_must_beat("lasp2", "linear_ring")
    ),
    **_slow_and_fast("chat16", 3.0, **_CHAT, runs=_PLACED),
    **_slow_and_fast("window16", 5.0, **_WINDOW, runs=(*_CONTIGUOUS, *_ZIGZAG)),
}
