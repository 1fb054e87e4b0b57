"""NCCL protocol latencies of ring collectives; NCCL uses the fastest protocol.

A ring of n ranks makes n - 1 steps, slower ones between nodes. Protocols for short messages have faster steps at a
fraction of the bandwidth. Figures: NCCL's own model (``src/graph/tuning.cc``, ``baseLat``, ``hwLat``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import NamedTuple

from cp_plugin.planner.machine.hardware import Wire


class Protocol(NamedTuple):
    """An NCCL protocol."""

    start_s: float
    step_s: Mapping[Wire, float]
    share: float
    """Fraction of the link's rate."""
    tree: bool = False
    """Whether steps grow with the logarithm of the ranks; only with one rank per node (PAT, NCCL 2.23)."""

    def latency(self, ranks: int, nodes: int, inside: Wire, between: Wire) -> float:
        """Seconds for zero bytes."""
        if self.tree:
            return self.start_s + ceil(log2(ranks)) * self.step_s[between]
        return self.start_s + (ranks - nodes) * self.step_s[inside] + (nodes - 1) * self.step_s[between]


_SIMPLE: Mapping[Wire, float] = {"nvlink": 3.4e-6, "pcie": 5.7e-6, "network": 14e-6}
SIMPLE = Protocol(8.4e-6, _SIMPLE, 1.0)
LL128 = Protocol(14e-6, {"nvlink": 1.9e-6, "pcie": 2.5e-6, "network": 4e-6}, 0.92)
LL = Protocol(6.6e-6, {"nvlink": 0.6e-6, "pcie": 1e-6, "network": 2.7e-6}, 0.25)
PAT = Protocol(8.4e-6, _SIMPLE, 0.75, tree=True)


def protocols(ranks: int, nodes: int, inside: Wire) -> tuple[Protocol, ...]:
    """The protocols available to NCCL; LL128 needs NVLink within nodes."""
    found = [SIMPLE, LL]
    if inside == "nvlink":
        found.append(LL128)
    if nodes == ranks:
        found.append(PAT)
    return tuple(found)
