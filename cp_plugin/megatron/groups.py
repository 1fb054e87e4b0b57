"""Process groups: one per axis of the provider's mesh, beside Megatron's untouched ``cp`` group.

They are made through Megatron's own ``create_group``, which knows them for timeouts, right after Megatron has made its
groups, by all ranks in the same order. Their NCCL options are those of ``cp_plugin_<axis>`` in Megatron's
``--nccl-communicator-config-path`` and ``--high-priority-stream-groups``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from cp_plugin import providers
from cp_plugin.attention import ContextParallel
from cp_plugin.megatron import runtime
from cp_plugin.megatron.args import Settings
from cp_plugin.mesh import GroupMesh, axis_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """How Megatron was told to make its groups."""

    timeout: timedelta
    nccl: Mapping[str, Any] = field(default_factory=dict)
    """Group name -> NCCL communicator options."""


def create(settings: Settings, options: GroupOptions) -> None:
    """Make the groups of every context-parallel group, and register this rank's ``ContextParallel``; collective.

    Raises:
        ValueError: if the provider cannot have a mesh of this size.
    """
    cp_group = parallel_state.get_context_parallel_group()
    provider = providers.get(settings.provider)
    axes = provider.axes(cp_group.size(), settings.options)
    mine: dict[str, dist.ProcessGroup | None] = dict.fromkeys(axes)
    for ranks in _all_cp_groups(cp_group):
        for axis, lists in axis_groups(list(ranks), axes).items():
            for members in lists if axes[axis] > 1 else []:
                group = parallel_state.create_group(
                    list(members),
                    timeout=options.timeout,
                    pg_options=parallel_state.get_nccl_options(f"cp_plugin_{axis}", dict(options.nccl)),
                    group_desc=f"CP_PLUGIN_{axis.upper()}_GROUP",
                )
                if dist.get_rank() in members:
                    mine[axis] = group
    mesh = GroupMesh(axes, mine, cp_group.rank())
    runtime.register(cp_group, ContextParallel(provider, mesh=mesh, layout=settings.layout, backend=settings.backend))


def options_from(arguments: Mapping[str, Any]) -> GroupOptions:
    """The options from the arguments of ``initialize_model_parallel``.

    Raises:
        ValueError: if it builds the groups of a part of the ranks only, which a model of several modules does.
    """
    part = arguments.get("local_world_size")
    if arguments.get("rank_offset") or (part is not None and part != dist.get_world_size()):
        raise ValueError(
            "--cp-provider does not support models whose modules have process groups of their own "
            "(initialize_model_parallel with rank_offset or local_world_size): use --cp-provider upstream"
        )
    nccl: dict[str, Any] = {}
    path = arguments.get("nccl_communicator_config_path")
    if path is not None:
        import yaml

        with open(path, encoding="utf-8") as stream:
            nccl = yaml.safe_load(stream) or {}
    for name in arguments.get("high_priority_stream_groups") or ():
        nccl.setdefault(name, {})["is_high_priority_stream"] = True
    return GroupOptions(timeout=timedelta(minutes=arguments["distributed_timeout_minutes"]), nccl=nccl)


def _all_cp_groups(cp_group: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """The ranks of every context-parallel group, in the same order on all ranks. Asked of the ranks, not computed, so
    that every rank order and every further axis Megatron has is covered."""
    lists: list[Sequence[int]] = [()] * dist.get_world_size()
    dist.all_gather_object(lists, dist.get_process_group_ranks(cp_group))
    return sorted({tuple(ranks) for ranks in lists})
