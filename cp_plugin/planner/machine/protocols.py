"""How long the ring of a collective takes NCCL, by its protocols: the fastest is used, as NCCL does.

A ring of n ranks makes n - 1 steps, of which those between nodes take longer. Protocols for short messages take less
time for a step, and reach a part of the rate. Figures: NCCL's own model (``src/graph/tuning.cc``, ``baseLat``,
``hwLat``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import NamedTuple

from cp_plugin.planner.machine.hardware import Wire


class Protocol(NamedTuple):
    """One way to send what a collective sends."""

    start_s: float
    step_s: Mapping[Wire, float]
    """Seconds of a step over such a link."""
    share: float
    """Of the link's rate."""
    tree: bool = False
    """Whether steps grow with the logarithm of the ranks; only where each is on a node of its own (PAT, NCCL 2.23)."""

    def latency(self, ranks: int, nodes: int, inside: Wire, between: Wire) -> float:
        """Seconds beside those of the bytes."""
        if self.tree:
            return self.start_s + ceil(log2(ranks)) * self.step_s[between]
        return self.start_s + (ranks - nodes) * self.step_s[inside] + (nodes - 1) * self.step_s[between]


_SIMPLE: Mapping[Wire, float] = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14e-6}
SIMPLE = Protocol(8.4e-6, _SIMPLE, 1.0)
LL128 = Protocol(14e-6, {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4e-6}, 0.92)
"""Over NVLink inside nodes."""
LL = Protocol(6.6e-6, {"nvlink": 0.6e-6, "pcie": 1e-6, "network": 2.7e-6}, 0.25)
PAT = Protocol(8.4e-6, _SIMPLE, 0.75, tree=True)


def protocols(ranks: int, nodes: int, inside: Wire) -> tuple[Protocol, ...]:
    """Those that NCCL chooses from."""
    found = [SIMPLE, LL]
    if inside == "nvlink":
        found.append(LL128)
    if nodes == ranks:
        found.append(PAT)
    return tuple(found)
