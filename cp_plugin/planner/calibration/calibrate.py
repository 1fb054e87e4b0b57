"""A profile of the machines that ranks run on, measured by all of them together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import psutil
import torch
import torch.distributed as dist

from cp_plugin.comm import network_between
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.core.hosts import hosts_of
from cp_plugin.planner.calibration import kernel_rates
from cp_plugin.planner.calibration.link_rates import Measured
from cp_plugin.planner.machine.hardware import Cluster, Device, Link

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
"""Those that are measured."""


def calibrate(
    name: str,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (),
    head_dim: int | None = None,
    hosts: Sequence[str] = (),
    shown: Callable[[str], object] = lambda text: None,
) -> Cluster:
    """Measure kernels and links. Collective over all ranks of ``torch.distributed``; they get the same profile.

    Args:
        dtypes: of attention and matrix products; default: ``DTYPES``.
        head_dim: of attention; default: 64 on the CPU, 128 on CUDA. Part of a kernel's work does not depend on it, so
            rates are those of this size.
        hosts: of every rank; default: as they say themselves.
        shown: told what is measured next.

    Raises:
        ValueError: for one rank, which has no links, or hosts with different numbers of ranks.
    """
    size = dist.get_world_size()
    if size == 1:
        raise ValueError("one rank has no links to measure: start two or more, on the machines that are to be used")
    sharing = hosts_of(dist.group.WORLD)
    links = Measured(hosts or sharing, device, shown)
    sizes = kernel_rates.ON_CUDA if device.type == "cuda" else kernel_rates.ON_CPU
    sizes = sizes._replace(head_dim=head_dim or sizes.head_dim)
    found = _device(device, dtypes or DTYPES[device.type], sizes, _sharers(device, sharing), shown)
    not_yet = Link(latency_s=0.0, bytes_per_s=1e9)
    profile = Cluster(
        name=name,
        device=found,
        per_node=links.per_node,
        intra=not_yet,
        inter=not_yet,
        nics=1,
        transport=network_between(device),
    )
    figures = links.figures(profile)
    measured = profile.model_copy(update={**figures._asdict(), "source": _source(size, links.per_node)})
    everywhere = [measured]
    dist.broadcast_object_list(everywhere, src=0)
    return everywhere[0]


def _device(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    sizes: kernel_rates.Sizes,
    sharers: int,
    shown: Callable[[str], object],
) -> Device:
    memory = kernel_rates.memory(device, sizes, shown)
    names = [dtype_name(dtype) for dtype in dtypes]
    return Device(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        memory_bytes=float(_memory_bytes(device)),
        memory_bytes_per_s=memory.bytes_per_s,
        gemm_flops_per_s={
            n: kernel_rates.products(device, t, sizes, shown) for n, t in zip(names, dtypes, strict=True)
        },
        attention={n: kernel_rates.attention(device, t, sizes, shown) for n, t in zip(names, dtypes, strict=True)},
        launch_s=memory.launch_s,
        shared_by=sharers,
        source=f"measured with all ranks at work, heads of {sizes.head_dim}",
    )


def _sharers(device: torch.device, hosts: Sequence[str]) -> int:
    """Ranks that share a core; 0 where each has a device of its own."""
    if device.type == "cuda":
        return 0
    here = hosts.count(hosts[dist.get_rank()])
    return math.ceil(here / len(os.sched_getaffinity(0)))


def _memory_bytes(device: torch.device) -> int:
    """Of a device; of a host, a rank's share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _source(size: int, per_node: int) -> str:
    """How and when it was measured."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return (
        f"measured by cp-plugin calibrate on {size} ranks, {per_node} on each node, at work at the same time; torch "
        f"{torch.__version__}, {when}"
    )
