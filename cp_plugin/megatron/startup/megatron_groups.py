"""Megatron's process groups must be those that the arguments of ``initialize_model_parallel`` describe.

    order "tp-cp-ep-dp-pp"    a rank's number counts its place along tp fastest, and along pp slowest

The plugin makes its own groups beside Megatron's context-parallel ones. Other ranks in these, or in the groups over
which gradients are reduced, would train without an error on tokens or gradients of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
_GROUPS: Mapping[str, tuple[str, Callable[[], dist.ProcessGroup]]] = {
    "tp": ("tensor-parallel", lambda: parallel_state.get_tensor_model_parallel_group()),
    "cp": ("context-parallel", lambda: parallel_state.get_context_parallel_group()),
    "pp": ("pipeline-parallel", lambda: parallel_state.get_pipeline_model_parallel_group()),
    "dp": ("data-parallel", lambda: parallel_state.get_data_parallel_group()),
    "dp-cp": (
        "data- and context-parallel",
        lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    ),
    "tp-cp": ("tensor- and context-parallel", lambda: parallel_state.get_tensor_and_context_parallel_group()),
}


def check(arguments: Mapping[str, Any]) -> None:
    """Compare this rank's groups.

    Args:
        arguments: of ``initialize_model_parallel``, by name.

    Raises:
        ValueError: for a group of other ranks.
    """
    order = str(arguments.get("order", "")).lower().split("-")
    if not {"tp", "cp", "dp", "pp"} <= {*order} <= {"tp", "cp", "dp", "pp", "ep"}:
        return  # an axis that only a later Megatron has
    sizes = {axis: arguments.get(name) or 1 for axis, name in _SIZES.items()} | {"ep": 1}
    sizes["dp"] = dist.get_world_size() // prod(sizes.values())
    if prod(sizes.values()) != dist.get_world_size() or (arguments.get("gtp_remat_size") or 1) > 1:
        return
    for axes, (name, group) in _GROUPS.items():
        want = members(dist.get_rank(), [(axis, sizes[axis]) for axis in order], axes.split("-"))
        found = dist.get_process_group_ranks(group())
        if want != sorted(found):
            raise ValueError(
                f"initialize_model_parallel of this Megatron created a {name} group of the ranks {found} on rank "
                f"{dist.get_rank()}, where its order {arguments['order']!r} gives {want}: it would use gradients or "
                "tokens of other ranks. Use a Megatron without this change, or --cp-provider upstream"
            )


def members(rank: int, order: Sequence[tuple[str, int]], axes: Sequence[str]) -> list[int]:
    """The ranks of a rank's group along some axes, ascending.

    Args:
        order: axes with their sizes, that of neighbouring ranks first.
    """
    found, stride = [rank], 1
    for axis, size in order:
        if axis in axes:
            place = rank // stride % size
            found = [one + stride * (other - place) for one in found for other in range(size)]
        stride *= size
    return sorted(found)
