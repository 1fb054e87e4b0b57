"""Ranks of a trial inside the virtual cluster of ci/cluster: everything goes over its links, the run's store too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from network import Network, Topology

__all__ = ["Network", "Topology", "join"]
_PORT = "29511"
"""In a network namespace of its own, where nothing else listens."""


def join(network: Network) -> None:
    """Move this rank into its node, with the store on rank 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = network.enter(int(os.environ["RANK"]))
    os.environ.update(MASTER_ADDR=network.topology.address(0), MASTER_PORT=_PORT, TORCHELASTIC_USE_AGENT_STORE="False")
