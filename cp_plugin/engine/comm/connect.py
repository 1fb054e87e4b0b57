"""Connect process groups where they are made, not in the middle of a method.

NCCL creates a group's communicator in the group's first operation, which all its ranks must call. A method's first
message may be between some of them only; those would wait for the others until they time out. And a communicator that
cannot be created is best reported where its purpose is known.

An operation also allocates the buffers of NCCL's algorithm for it, so the first one is of the kind that a group is for:

    all-gather of a number             along axes that gather or sum (``Provider.collective_axes``)
    exchange with both neighbours      along all others, which never use the buffers of a collective's rings and trees
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

from cp_plugin.engine.common.text import ranks_named
from cp_plugin.engine.core.problem import Network


class ConnectError(RuntimeError):
    """A process group whose ranks cannot reach each other."""


def connect(groups: Mapping[str, dist.ProcessGroup | None], *, collective: Collection[str] = ()) -> None:
    """Run the first operation of every group. Collective over each, in the given order. ConnectError naming the group
    and its ranks, if one of them is gone or does not join within the timeout.

    Args:
        groups: purpose -> group, in the same order on ranks that share groups; None and groups of one rank are skipped.
        collective: purposes that need collectives; the ranks of all others send each other messages.
    """
    for name, group in groups.items():
        if group is None or group.size() == 1 or dist.get_backend(group) == "fake":  # has no connections
            continue
        called = f"the process group {name!r} of {ranks_named(dist.get_process_group_ranks(group))}"
        try:
            answers = (_all_sizes if name in collective else _size_below)(group)
        except RuntimeError as error:
            raise ConnectError(
                f"{called} cannot connect from rank {dist.get_rank()}: {error}; all of these ranks must be up and "
                "reach each other (NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for the interface)"
            ) from error
        if set(answers) != {group.size()}:
            raise ConnectError(f"{called} counts {answers} ranks instead of {group.size()}")


def _all_sizes(group: dist.ProcessGroup) -> list[int]:
    """The group's size as every rank knows it."""
    size = torch.full((1,), group.size(), device=device_of(group))
    everyone = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(everyone, size, group=group)
    return torch.cat(everyone).tolist()


def _size_below(group: dist.ProcessGroup) -> list[int]:
    """The group's size as the rank below knows it; the rank above is sent ours."""
    rank, n = group.rank(), group.size()
    size = torch.full((1,), n, device=device_of(group))
    received = torch.zeros_like(size)
    operations = [
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n),
        dist.P2POp(dist.isend, size, group=group, group_peer=(rank + 1) % n),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received.tolist()


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device of a group's messages: this process's CUDA device, or the CPU for Gloo."""
    on_cpu = dist.get_backend(group) == "gloo" or not torch.cuda.is_available()
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def network_between(device: torch.device | str) -> Network:
    """Return what carries messages between such devices: Gloo between CPUs, NCCL between GPUs."""
    return "gloo" if torch.device(device).type == "cpu" else "nccl"
