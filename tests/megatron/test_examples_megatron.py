"""Examples in Megatron: the process groups of each. Their methods train in ``cases.toml``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from nightly import one_case
from torch.testing._internal.distributed.fake_pg import FakeStore

from cp_plugin.cli.examples import config
from cp_plugin.cli.examples.config import load, words
from cp_plugin.comm.mesh import WHOLE, sums
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.planned.command import with_arguments
from cp_plugin.testing.launch import run_ranks

pytestmark = pytest.mark.usefixtures("_cpu_megatron")


@dataclass(frozen=True, slots=True)
class Built:
    """The plugin's groups of a kind of attention, of one rank."""

    place: dict[str, int]
    groups: dict[str, list[int]]
    made: list[tuple[str, list[int]]]
    """All that the rank has made, in order."""


def build(name: str) -> list[str]:
    """Build the groups of an example on fake ranks, one after the other in a process; return what is wrong."""
    of = load(name).experiment()

    def in_fork() -> Any:
        os.environ["WORLD_SIZE"] = str(of.devices)
        return with_arguments([word for flag in words(of.with_length()) for word in flag], _wrong)

    (found,) = run_ranks(in_fork, 1, timeout=300)
    return found


def _wrong(args: argparse.Namespace, settings: Settings) -> list[str]:
    from megatron.core import parallel_state as mpu

    from cp_plugin.megatron import groups, runtime
    from cp_plugin.megatron.rules import checks

    model, world, tensor = checks.model_of(args, settings), args.world_size, args.tensor_model_parallel_size
    cp_groups = [list(range(world))[first::tensor] for first in range(tensor)]
    assert world == tensor * args.context_parallel_size, "of each example, as published"
    mine = {rank: ranks for ranks in cp_groups for rank in ranks}
    made: list[tuple[str, list[int]]] = []
    make = mpu.create_group

    def create_group(ranks: list[int], **named: Any) -> Any:
        made.append((named["group_desc"], ranks))
        return make(ranks, **named)

    def every_rank(out: list[Any], _: Any, group: None) -> None:
        out[:] = [(tuple(mine[rank]), f"node{rank // 8}") for rank in range(world)]

    dist.all_gather_object = every_rank
    built: dict[str, list[Built]] = {kind: [] for kind in settings.kinds}
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        mpu.create_group = make
        mpu.initialize_model_parallel(tensor, context_parallel_size=world // tensor, create_gloo_process_groups=False)
        mpu.create_group, made = create_group, []
        runtime.configure(settings, model)
        groups.create(settings, groups.GroupOptions(timeout=timedelta(minutes=1)), model)
        for kind in settings.kinds:
            mesh = runtime.context_parallel(kind=kind).mesh
            ranks = {name: dist.get_process_group_ranks(group) for name, group in mesh.groups.items() if group}
            assert ranks and mesh.axes.keys() == mesh.coordinates.keys()
            built[kind].append(Built(dict(mesh.coordinates), ranks, made))
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
    return [text for one in built.values() for text in faults(one, mine)]


def faults(built: Sequence[Built], mine: Mapping[int, list[int]]) -> Iterator[str]:
    """Groups other than those, in order, that differ from a rank along the group's axes only; ranks that make others.

    mine: rank -> the ranks of its context-parallel group.
    """
    for rank, own in enumerate(built):
        if own.made != built[0].made:
            yield f"rank {rank} makes other groups than rank 0, or in another order"
        axis_of = {name: axis for axis in own.place for name in (axis, sums(axis))}
        for name, ranks in own.groups.items():
            along = own.place if name == WHOLE else [axis_of[name]]
            fixed = own.place.keys() - set(along)
            alike = [n for n in mine[rank] if all(built[n].place[axis] == own.place[axis] for axis in fixed)]
            if ranks != (right := sorted(alike, key=lambda n: [built[n].place[axis] for axis in along])):
                yield f"{name}: rank {rank} has {ranks}, not {right}"


@one_case
@pytest.mark.parametrize("name", config.names())
def test_every_rank_has_the_right_groups(name: str) -> None:
    assert build(name) == []
