"""Process groups: one per axis of the provider's mesh plus its extra ones; Megatron's ``cp`` group stays untouched.

Linear attention has one axis and uses Megatron's ``cp`` group itself.

Groups are made with Megatron's ``create_group``, which applies its timeouts, right after Megatron's own, in the same
order on all ranks. Their NCCL options are those of ``cp_plugin_<axis>`` in ``--nccl-communicator-config-path``. Streams
have high priority unless that file says otherwise: a message behind a kernel that fills the device overlaps nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.comm import GroupMesh, axis_groups, connect
from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.common import yaml_files
from cp_plugin.engine.core.problem import Problem, describe_hosts
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.gradient_dtype import float32_unless_told
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.engine.methods.registry import Resolved
from cp_plugin.megatron import runtime
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.rules import checks
from cp_plugin.megatron.state import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """Megatron's options for process groups."""

    timeout: timedelta
    nccl: Mapping[str, Any] = field(default_factory=dict)
    """Group name -> NCCL communicator options."""


class _Place(NamedTuple):
    """One context-parallel group."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]


def create(
    settings: Settings, options: GroupOptions, model: Model | None = None, cp_group: dist.ProcessGroup | None = None
) -> None:
    """Make the groups of every context-parallel group, and register this rank's ``ContextParallel``; collective.

    model: the resolved attention; None: the model is not known.
    cp_group: this rank's; None: Megatron's.

    Raises:
        ValueError: if the provider has no mesh of this size, or does not support the model's attention.
    """
    if cp_group is None:
        cp_group = parallel_state.get_context_parallel_group()
    size = cp_group.size()
    if model is None or model.problem.size != size:  # assume that an unknown model's heads divide over the ranks
        unknown = Problem(size=size, heads=size, kv_heads=size)
        if model is None and settings.softmax:
            chosen = float32_unless_told(providers.get(settings.provider), settings.options)
            settings = replace(settings, options=chosen)
        model = checks.resolve(settings, unknown if model is None else replace(model.problem, size=size))
    # gathered, so that any rank order and any placement by the launcher is right
    everyone = gather_objects((dist.get_process_group_ranks(cp_group), socket.gethostname()))
    places = [
        _Place(ranks, tuple(everyone[rank][1] for rank in ranks)) for ranks in sorted({tuple(x) for x, _ in everyone})
    ]
    own_place = next(place for place in places if dist.get_rank() in place.ranks)
    by_kind: dict[Kind, ContextParallel] = {}
    for kind in settings.kinds:
        resolved = _resolve_for_hosts(settings, model, places, own_place) if kind == "softmax" else model.resolved[kind]
        axes, extra = resolved.axes, resolved.provider.extra_groups
        have = {axis: cp_group for axis, n in axes.items() if kind == "linear" and n == size > 1}
        own = have | _make(options, places, axes, extra, without=have)
        mesh = GroupMesh(axes, own, cp_group.rank(), by_kind["softmax"].mesh.ledger if "softmax" in by_kind else None)
        connect(mesh.groups, collective=resolved.provider.collective_axes)
        if kind == "softmax":
            resolved = replace(resolved, problem=resolved.problem.with_transport(hosts=own_place.hosts))
        by_kind[kind] = ContextParallel(resolved, group=cp_group, mesh=mesh)
    _require_one_order(**by_kind)
    runtime.register(cp_group, by_kind)


def _require_one_order(*, linear: ContextParallel | None = None, softmax: ContextParallel | None = None) -> None:
    """ValueError if layers of both kinds have their tokens in different orders."""
    if linear is None or softmax is None:
        return
    length = linear.layout.divisor(linear.size)
    if not torch.equal(softmax.positions(length), linear.positions(length)):
        raise ValueError(
            f"--cp-provider {softmax.provider.name} assigns {linear.layout.name} tokens to ranks in a different order "
            f"from --cp-linear-provider {linear.provider.name}, but a model has a single order: use another "
            "--cp-provider"
        )


def _make(
    options: GroupOptions,
    places: Sequence[_Place],
    axes: Mapping[str, int],
    extra: Sequence[str],
    without: Collection[str] = (),
) -> dict[str, dist.ProcessGroup | None]:
    """Make the groups of all places in the same order on all ranks; returns those of this rank."""
    own: dict[str, dist.ProcessGroup | None] = {}
    for place in places:
        for name, lists in axis_groups(place.ranks, axes, extra).items():
            for members in lists if name not in without else ():
                group = parallel_state.create_group(
                    list(members),
                    timeout=options.timeout,
                    pg_options=_nccl_options(f"cp_plugin_{name}", options),
                    group_desc=f"CP_PLUGIN_{name.upper()}_GROUP",
                )
                if dist.get_rank() in members:
                    own[name] = group
    return own


def _nccl_options(name: str, options: GroupOptions) -> Any:
    """Megatron's options of a group; on NCCL with high-priority streams by default."""
    if dist.get_backend() != "nccl":
        return parallel_state.get_nccl_options(name, dict(options.nccl))
    nccl = {"is_high_priority_stream": True, **options.nccl.get(name, {})}
    return parallel_state.get_nccl_options(name, {name: nccl})


def options_from(arguments: Mapping[str, Any]) -> GroupOptions:
    """The options among the arguments of ``initialize_model_parallel``.

    ValueError if it builds groups for some of the ranks only, and for an invalid file of NCCL options.
    """
    part = arguments.get("local_world_size")
    if arguments.get("rank_offset") or (part is not None and part != dist.get_world_size()):
        raise ValueError(
            f"{runtime.settings().flag} does not support models whose modules have their own process groups "
            f"(initialize_model_parallel with rank_offset or local_world_size): {runtime.settings().instead}"
        )
    nccl: dict[str, Any] = {}
    path = arguments.get("nccl_communicator_config_path")
    if path is not None:
        nccl = yaml_files.read(Path(path)) or {}
        if not isinstance(nccl, dict) or not all(isinstance(one, dict) for one in nccl.values()):
            raise ValueError(
                f"--nccl-communicator-config-path {path}: write the name of a group and its options below it, such as "
                "cp_plugin_ring: {min_ctas: 8}"
            )
    for name in arguments.get("high_priority_stream_groups") or ():
        nccl.setdefault(name, {})["is_high_priority_stream"] = True
    return GroupOptions(timeout=timedelta(minutes=arguments["distributed_timeout_minutes"]), nccl=nccl)


def _resolve_for_hosts(settings: Settings, model: Model, places: Sequence[_Place], own_place: _Place) -> Resolved:
    """Resolve softmax attention for this rank's group, considering its hosts if the provider asks for them.

    All ranks make the groups of all context-parallel groups together, so all must be alike: where hosts would lead to
    different choices, no rank considers them.
    """
    without = model.resolved["softmax"]
    if not without.provider.asks_hosts(settings.options):
        return without
    examples = {_pattern(place.hosts): place for place in (*places, own_place)}.values()
    choices = {
        place: checks.resolve_kind("softmax", settings, model.problem.with_transport(hosts=place.hosts))
        for place in examples
    }
    if all(choice.options == choices[own_place].options for choice in choices.values()):
        return choices[own_place]
    shown = "; ".join(f"{list(place.ranks)}: {describe_hosts(place.hosts)}" for place in list(examples)[:4])
    runtime.print_notice(
        f"warning: the context-parallel groups are spread over the hosts in different ways ({shown}), so --cp-provider "
        f"{settings.provider} chooses as if the hosts were unknown"
    )
    return without


def _pattern(hosts: Sequence[str]) -> tuple[int, ...]:
    """Equal for placements that differ only in host names."""
    return tuple(hosts.index(host) for host in hosts)
