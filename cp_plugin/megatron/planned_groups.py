"""Dry run of process groups: Megatron's and the plugin's own code on forked ranks.

Every rank of the training is a process with the command's arguments, its local rank and its node's name. It runs
Megatron's ``_initialize_distributed`` with the plugin's hooks: compare flags, find hosts, create groups. The world and
the plugin's groups are real Gloo groups, through each of which the ranks exchange their numbers. Megatron's other
groups use torch's fake backend without connections: with Gloo 64 ranks take three times as long.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.patches import patching
from cp_plugin.megatron.patches.contract import wraps
from cp_plugin.megatron.patches.patching import Patch
from cp_plugin.megatron.planned.command import SECONDS, Planned, Refused, with_arguments
from cp_plugin.megatron.planned.sizes import from_args
from cp_plugin.testing.launch import run_ranks

MEGATRONS = ("tp", "cp", "dp", "pp")  # Megatron's axes
_PLUGINS = "CP_PLUGIN_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group as seen by one rank."""

    ranks: tuple[int, ...]  # in the group's order
    axes: dict[str, int]  # axes along which its ranks differ, slowest first -> sizes
    among: tuple[str, ...]  # all axes that place a rank
    made: int  # number of groups of this name with this rank
    heard: tuple[int, ...] = ()  # ranks that answered through it; empty: not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One rank's coordinates and groups."""

    coordinates: dict[str, int]  # along Megatron's and the plugin's axes
    groups: dict[str, Group]
    why: tuple[str, ...]  # the provider's choices and reasons


def read_with_groups(flags: Sequence[str], devices: int, per_node: int) -> tuple[Planned, list[Member]]:
    """Like ``planned.command.read``, with each rank's groups.

    Raises:
        ValueError: as ``planned.command.read`` does.
        RankError: if a rank cannot create its groups.
    """
    environment = {"WORLD_SIZE": str(devices)}
    (found,) = run_ranks(_lead, 1, args=(list(flags), devices, per_node), env=environment, timeout=SECONDS)
    if isinstance(found, Refused):
        raise ValueError(found.message)
    return found


def _lead(flags: list[str], devices: int, per_node: int) -> tuple[Planned, list[Member]] | Refused:
    """Validate the arguments in a forked process, and fork the ranks from it."""

    def prepare(args: argparse.Namespace, settings: Settings) -> tuple[Planned, argparse.Namespace]:
        from megatron.training import global_vars, initialize  # noqa: F401

        from cp_plugin.megatron.patches import hooks
        from cp_plugin.megatron.planned import auto
        from cp_plugin.megatron.rules import checks

        if settings.undecided:
            settings = auto.decide(args, settings)
        patching.install([*hooks.START_UP, CREATE_GROUP])
        hooks.start(settings, checks.model_of(args, settings) if settings.active else None, args)
        args.distributed_backend = "gloo"
        return Planned(*from_args(args, settings), settings), args

    prepared = with_arguments(flags, prepare)
    if isinstance(prepared, Refused):
        return prepared
    planned, args = prepared
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # silence Megatron on rank 0
    return planned, run_ranks(_rank, devices, args=(args, per_node), timeout=SECONDS)


class _Maker:
    """Megatron's ``create_group`` with a count, on the fake backend for all but the plugin's groups."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.mine: Counter[str] = Counter()  # description -> number of groups with this rank

    def __call__(self, ranks: Sequence[int], *args: Any, group_desc: str | None = None, **named: Any) -> Any:
        if ranks is None or dist.get_rank() in ranks:
            self.mine[str(group_desc)] += 1
        if not str(group_desc).startswith(_PLUGINS):
            named |= {"backend": "fake", "pg_options": None, "use_local_synchronization": True}
        return self.original(ranks, *args, group_desc=group_desc, **named)


CREATE_GROUP = Patch(
    target="megatron.core.parallel_state:create_group",
    make=_Maker,
    reason="planned groups, which are counted and have no connections",
    contract=wraps("ranks", "group_desc", "backend", "pg_options", "use_local_synchronization"),
)


def _rank(args: argparse.Namespace, per_node: int) -> Member:
    from megatron.core import parallel_state
    from megatron.training import global_vars, initialize

    rank = int(os.environ["RANK"])
    args.rank, args.local_rank = rank, rank % per_node
    os.environ.update(LOCAL_RANK=str(args.local_rank), LOCAL_WORLD_SIZE=str(per_node))
    socket.gethostname = lambda: f"node{rank // per_node}"
    global_vars.set_args(args)
    initialize._initialize_distributed(None, None, None)
    found = _megatrons(args, parallel_state.create_group.mine)
    return _with_ours(found, parallel_state.create_group.mine)


def _megatrons(args: argparse.Namespace, made: Counter[str]) -> Member:
    from megatron.core import parallel_state as mpu

    sizes = {
        "pp": args.pipeline_model_parallel_size,
        "dp": args.data_parallel_size,
        "cp": args.context_parallel_size,
        "tp": args.tensor_model_parallel_size,
    }
    groups = {
        "tp": (mpu.get_tensor_model_parallel_group(), "TENSOR_MODEL_PARALLEL_GROUP"),
        "cp": (mpu.get_context_parallel_group(), "CONTEXT_PARALLEL_GROUP"),
        "dp": (mpu.get_data_parallel_group(), "DATA_PARALLEL_GROUP"),
        "pp": (mpu.get_pipeline_model_parallel_group(), "PIPELINE_MODEL_PARALLEL_GROUP"),
        "dp x cp": (mpu.get_data_parallel_group(with_context_parallel=True), "DATA_PARALLEL_GROUP_WITH_CP"),
    }
    found = {
        axes: Group(
            ranks=tuple(dist.get_process_group_ranks(group)),
            axes={axis: sizes[axis] for axis in axes.split(" x ")},
            among=MEGATRONS,
            made=made[name],
        )
        for axes, (group, name) in groups.items()
    }
    return Member(coordinates={axis: groups[axis][0].rank() for axis in MEGATRONS}, groups=found, why=())


def _with_ours(of: Member, made: Counter[str]) -> Member:
    """Add the plugin's groups: for each kind of attention one per mesh axis, and extra ones."""
    from megatron.core import parallel_state as mpu

    from cp_plugin.comm import WHOLE, sums
    from cp_plugin.megatron import runtime

    coordinates, groups, why = dict(of.coordinates), dict(of.groups), []
    for kind in runtime.kinds():
        cp = runtime.context_parallel(kind=kind)
        before = "linear " if kind == "linear" else ""
        axes = {before + axis: n for axis, n in cp.mesh.axes.items()}
        coordinates |= {before + axis: number for axis, number in cp.mesh.coordinates.items()}
        alone = {sums(axis): axis for axis in cp.mesh.axes}
        for name, group in cp.mesh.groups.items():
            if group is None or group is mpu.get_context_parallel_group():
                continue
            along = axes if name == WHOLE else {before + alone.get(name, name): cp.mesh.axes[alone.get(name, name)]}
            groups[before + name] = Group(
                ranks=tuple(dist.get_process_group_ranks(group)),
                axes=along,
                among=("tp", "dp", "pp", *axes),
                made=made[f"{_PLUGINS}{name.upper()}_GROUP"],
                heard=_heard(group),
            )
        why += cp.why
    return Member(coordinates=coordinates, groups=groups, why=tuple(why))


def _heard(group: dist.ProcessGroup) -> tuple[int, ...]:
    found = [-1] * group.size()
    dist.all_gather_object(found, dist.get_rank(), group=group)
    return tuple(found)
