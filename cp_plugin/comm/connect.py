"""Connect process groups where they are made, and not in the middle of a method.

NCCL makes a group's communicator at the group's first operation, which all its ranks have to call. A method's first
message may be between some of them only: the others would never join, and the first ones wait until they time out. And
a communicator that cannot be made is named best where it is known what it is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from cp_plugin.comm.watch import Watch
from cp_plugin.core.problem import Network
from cp_plugin.core.text import ranks_named


class ConnectError(RuntimeError):
    """A process group whose ranks do not reach each other."""


def connect(groups: Mapping[str, dist.ProcessGroup | None], watch: Watch | None = None) -> None:
    """Make the first operation of every group: a sum of one number. Collective over each, in the order given.

    Args:
        groups: what each is for -> the group; None and groups of one rank have nothing to connect. Ranks that share
            groups give them in one order.
        watch: told of each while it is under way.

    Raises:
        ConnectError: naming the group and its ranks, if one of them is gone or does not come within the timeout.
    """
    for name, group in groups.items():
        if group is None or group.size() == 1 or dist.get_backend(group) == "fake":  # a dry run's talks to nobody
            continue
        called = f"the process group {name!r} of {ranks_named(dist.get_process_group_ranks(group))}"
        try:
            with nullcontext() if watch is None else watch.blocking(partial(str, f"connecting {called}")):
                number = torch.ones(1, device=device_of(group))
                dist.all_reduce(number, group=group)
                found = int(number.item())
        except RuntimeError as error:
            raise ConnectError(
                f"{called} cannot be connected from rank {dist.get_rank()}: {error}; all of these ranks must be up and "
                "reach each other (NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for the interface)"
            ) from error
        if found != group.size():
            raise ConnectError(f"{called} counts {found} ranks instead of {group.size()}")


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the messages of a group are: this process's CUDA device, or the CPU for Gloo."""
    on_cpu = dist.get_backend(group) == "gloo" or not torch.cuda.is_available()
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def network_between(device: torch.device | str) -> Network:
    """What carries messages between devices of this kind: Gloo between CPUs, NCCL between GPUs."""
    return "gloo" if torch.device(device).type == "cpu" else "nccl"
