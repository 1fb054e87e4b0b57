"""Meshes (named axes of ranks and verbs that move tensors along them) and the ledger of their traffic."""

from cp_plugin.engine.comm.connect import ConnectError, connect, device_of, network_between
from cp_plugin.engine.comm.group import GroupMesh, MessageError, Named
from cp_plugin.engine.comm.mesh import (
    WHOLE,
    Ledger,
    Mesh,
    Pending,
    TraceMesh,
    Traffic,
    axis_groups,
    coordinates,
    flat_index,
    sums,
)
from cp_plugin.engine.comm.threads import ThreadMesh, run_threads
from cp_plugin.engine.comm.watch import Watch

__all__ = [
    "WHOLE",
    "ConnectError",
    "GroupMesh",
    "Ledger",
    "Mesh",
    "MessageError",
    "Named",
    "Pending",
    "ThreadMesh",
    "TraceMesh",
    "Traffic",
    "Watch",
    "axis_groups",
    "connect",
    "coordinates",
    "device_of",
    "flat_index",
    "network_between",
    "run_threads",
    "sums",
]
