"""A cluster with round figures, on which durations can be computed by hand."""

from __future__ import annotations

from cp_plugin.planner.machine.hardware import Cluster, Device, Kernel, Link, Rate


def round_cluster(
    *,
    flops_per_s: float,
    memory_bytes_per_s: float = 1e14,
    intra: tuple[float, float],
    inter: tuple[float, float],
    per_node: int = 1,
    nics: int = 1,
    shared_by: int = 0,
) -> Cluster:
    """Kernels without overhead, in blocks of one.

    Args:
        memory_bytes_per_s: by default practically infinite.
        intra, inter: seconds of a message, and bytes per second.
    """
    rate = Rate(flops_per_s=flops_per_s, overhead_s=0.0)
    return Cluster(
        name="round",
        device=Device(
            name="round",
            memory_bytes=10e9,
            memory_bytes_per_s=memory_bytes_per_s,
            gemm_flops_per_s={"bfloat16": flops_per_s, "float32": flops_per_s},
            attention={"bfloat16": Kernel(forward=rate, backward=rate, block=(1, 1))},
            launch_s=0.0,
            shared_by=shared_by,
        ),
        per_node=per_node,
        intra=Link(latency_s=intra[0], bytes_per_s=intra[1]),
        inter=Link(latency_s=inter[0], bytes_per_s=inter[1]),
        nics=nics,
    )
