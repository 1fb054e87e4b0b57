"""Calibration: measure a cluster profile collectively on all ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import psutil
import torch
import torch.distributed as dist

from cp_plugin.comm import network_between
from cp_plugin.comm.every_rank import gather_hosts
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.planner.calibration import kernel_rates
from cp_plugin.planner.calibration.link_rates import Measured
from cp_plugin.planner.machine.hardware import Cluster, Device, Link

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}


def calibrate(
    name: str,
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (),
    head_dim: int | None = None,
    hosts: Sequence[str] = (),
    shown: Callable[[str], object] = lambda text: None,
) -> Cluster:
    """Measure kernels and links; collective over all ranks of ``torch.distributed``, which return the same profile.
    ValueError for hosts with different numbers of ranks.

    Args:
        dtypes: of attention and matrix products; default: ``DTYPES``.
        head_dim: of attention; default: 64 on the CPU, 128 on CUDA. Rates hold for this size only.
        hosts: of every rank; default: their host names.
        shown: progress callback.
    """
    size = dist.get_world_size()
    sharing = gather_hosts()
    links = Measured(hosts or sharing, device, shown)
    sizes = kernel_rates.ON_CUDA if device.type == "cuda" else kernel_rates.ON_CPU
    sizes = sizes._replace(head_dim=head_dim or sizes.head_dim)
    found = _device(device, dtypes or DTYPES[device.type], sizes, sharing.count(sharing[dist.get_rank()]), shown)
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
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    source = (
        f"measured by cp-plugin calibrate on {size} ranks, {links.per_node} on each node, at work at the same time; "
        f"torch {torch.__version__}, {when}"
    )
    measured = profile.model_copy(update={**links.figures(profile), "source": source})
    everywhere = [measured]
    dist.broadcast_object_list(everywhere, src=0)
    return everywhere[0]


def _device(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    sizes: kernel_rates.Sizes,
    here: int,
    shown: Callable[[str], object],
) -> Device:
    """here: ranks on this host, which on the CPU share its memory and cores."""
    on_cuda = device.type == "cuda"
    bytes_per_s, launch_s = kernel_rates.memory(device, sizes, shown)
    names = [dtype_name(dtype) for dtype in dtypes]
    return Device(
        name=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        memory_bytes=float(
            torch.cuda.get_device_properties(device).total_memory if on_cuda else psutil.virtual_memory().total // here
        ),
        memory_bytes_per_s=bytes_per_s,
        gemm_flops_per_s={
            n: kernel_rates.products(device, t, sizes, shown) for n, t in zip(names, dtypes, strict=True)
        },
        attention={n: kernel_rates.attention(device, t, sizes, shown) for n, t in zip(names, dtypes, strict=True)},
        launch_s=launch_s,
        shared_by=0 if on_cuda else math.ceil(here / len(os.sched_getaffinity(0))),
        source=f"measured with all ranks at work, heads of {sizes.head_dim}",
    )
