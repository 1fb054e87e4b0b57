"""Examples in Megatron: the process groups of each, and a real step with narrow layers, against one rank."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
import training
from nightly import nightly, one_case
from torch.testing._internal.distributed.fake_pg import FakeStore
from warm import before_forking

from cp_plugin.cli.examples import config
from cp_plugin.cli.examples.config import Value, changed, load, words
from cp_plugin.comm.mesh import WHOLE, sums
from cp_plugin.megatron.cpu import mode as cpu
from cp_plugin.megatron.flags.args import Settings
from cp_plugin.megatron.planned.command import with_arguments
from cp_plugin.testing.launch import run_ranks

RANKS, LENGTH = 4, 256
SGD = {"optimizer": "sgd", "sgd-momentum": 0, "lr": 0.05, "min-lr": 0, "lr-decay-style": "constant"}
SMALL: dict[str, Value] = {
    **{"num-layers": 2, "hidden-size": 64, "ffn-hidden-size": 128, "num-attention-heads": 4, "vocab-size": 257},
    **{"seq-length": LENGTH, "max-position-embeddings": LENGTH, "lr-warmup-iters": 0, "weight-decay": 0, **SGD},
    **{"calculate-per-token-loss": True, "disable-gloo-process-groups": True, "num-workers": 0},
}
NOT_ON_CPU = (
    *("fp8-format", "fp8-recipe", "use-megatron-fsdp", "data-parallel-sharding-strategy", "ckpt-format"),
    *("use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather", "optimizer-cpu-offload"),
    *("optimizer-offload-fraction", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer", "train-iters"),
)
SHAPE = {"cp-grid": "2x2", "cp-intra-size": 2, "cp-head-parallel": 2}
"""On four ranks; a size of 1 stays."""


@dataclass(frozen=True, slots=True)
class Built:
    """The plugin's groups of a kind of attention, of one rank."""

    place: dict[str, int]
    groups: dict[str, list[int]]
    made: list[tuple[str, list[int]]]
    """All that the rank has made, in order."""


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    """Import Megatron once for all forked processes."""
    with cpu.cpu_mode():
        import megatron.training.initialize
        import megatron.training.training  # noqa: F401

        before_forking()
        yield


def line(flags: Mapping[str, Value]) -> list[str]:
    return [word for of_flag in words(flags) for word in of_flag]


def build(name: str) -> list[str]:
    """Build the groups of an example on fake ranks, one after the other in a process; return what is wrong."""
    of = load(name).experiment()

    def in_fork() -> Any:
        os.environ["WORLD_SIZE"] = str(of.devices)
        return with_arguments(line(of.with_length()), _wrong)

    (found,) = run_ranks(in_fork, 1, timeout=300)
    return found


def _wrong(args: argparse.Namespace, settings: Settings) -> list[str]:
    from megatron.core import parallel_state as mpu

    from cp_plugin.megatron import runtime
    from cp_plugin.megatron.layers import groups
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


def narrow(name: str, variant: str | None) -> dict[str, Value]:
    """The flags of an example on four CPU ranks with narrow layers; in float32, unless payloads are FP8."""
    full = load(name).experiment(variant).with_length()
    left_out = [*NOT_ON_CPU, *(["bf16"] if "cp-fp8" not in full else [])]
    found = changed(full, {**SMALL, **dict.fromkeys(left_out)})
    found["context-parallel-size"] = RANKS // int(str(full.get("tensor-model-parallel-size", 1)))
    return found | {flag: value for flag, value in SHAPE.items() if full.get(flag) not in (None, 1)}


@nightly
@one_case
@pytest.mark.parametrize(
    ("name", "variant"), [*((name, None) for name in config.names()), ("attention2d-64xh100", "fp8")]
)
def test_a_step_with_narrow_layers(name: str, variant: str | None) -> None:
    """Losses and gradients are those of one context-parallel rank."""
    many = narrow(name, variant)
    cp = int(str(many.pop("context-parallel-size")))
    kept = ("cp-linear-attention", "cp-layer-pattern") if "cp-linear-attention" in many else ()
    one = {flag: value for flag, value in many.items() if flag in kept or not flag.startswith("cp-")}
    divided = {flag: value for flag, value in many.items() if flag not in one}
    text, more, alike = " ".join(line(one)), " ".join(line(divided)), {"model": "", "training": ""}
    if variant is None:
        training.check(text, more, cp=cp, ranks=RANKS // cp, **alike)
        return
    got = training.train(RANKS, f"{text} --context-parallel-size {cp} {more}", steps=2, **alike)
    found = training.gap(got, training.train(RANKS // cp, text, steps=2, **alike))
    assert 0 < found.loss <= 2e-4, "payloads were rounded"
