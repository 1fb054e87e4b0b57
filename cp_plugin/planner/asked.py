"""What a user asks the planner: a model, a cluster, how many tokens; and what he leaves open."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cp_plugin.core.names import find
from cp_plugin.planner.machine.hardware import Cluster, cluster, override
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.parallel import RECOMPUTE, Parallel, Recompute, check

FromFlags = Callable[[list[str], int], tuple[Model, Parallel]]
"""Megatron's flags and a number of devices -> what they say; ValueError with Megatron's own message."""
_PIPELINES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Sizes of the parallelism that the user gave; None: to be found."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The question."""

    model: Model
    cluster: Cluster
    shapes: Sequence[Parallel]
    """Ways to divide the model over the devices."""


def of_flags(flags: list[str], devices: int, machine: str | Cluster, from_flags: FromFlags, **changes: int) -> Asked:
    """From Megatron's flags: all is given but the method.

    Raises:
        ValueError: for what Megatron refuses, in its words, and an unknown cluster.
    """
    found, parallel = from_flags(flags, devices)
    return Asked(model=found, cluster=_cluster(machine, devices, changes), shapes=[parallel])


def of_name(name: str, devices: int, seq_length: int, machine: str | Cluster, fixed: Fixed, **changes: int) -> Asked:
    """From a model of the catalogue: every way to divide it that fits what is given.

    Raises:
        ValueError: for an unknown model or cluster, and sizes that fit nothing.
    """
    found, there = model(name), _cluster(machine, devices, changes)
    if seq_length < 1:
        raise ValueError(f"--seq-length {seq_length}: give the tokens of one sequence, 1 or more")
    tried = [_shape(found, devices, seq_length, sizes) for sizes in _sizes(there, devices, fixed)]
    shapes = [shape for shape in tried if isinstance(shape, Parallel)]
    if not shapes:
        reasons = list(dict.fromkeys(str(reason) for reason in tried)) or [_nothing(devices, fixed)]
        raise ValueError(f"no way to divide {found.name} over {devices} devices: {'; '.join(reasons[:3])}")
    return Asked(model=found, cluster=there, shapes=shapes)


def fitting(asked: Asked, limit: float, global_batch: int | None = None) -> Asked:
    """The shapes that fit the memory, all with the same batch; all shapes if none does.

    Of shapes that differ in recomputation only, the one that repeats least.

    Args:
        limit: bytes of a device.
        global_batch: sequences of an iteration; None: one for each data-parallel rank of the shape that has most.

    Raises:
        ValueError: for a batch that no shape can divide.
    """
    found: dict[tuple[int, int, int], Parallel] = {}
    for shape in sorted(asked.shapes, key=lambda s: RECOMPUTE.index(s.recompute)):
        key = (shape.tensor, shape.pipeline, shape.context)
        if key not in found and footprint(asked.model, shape).total <= limit:
            found[key] = shape
    shapes = list(found.values()) or list(asked.shapes)
    if len(shapes) == 1 and global_batch is None:
        return replace(asked, shapes=shapes)
    batch = global_batch or max(shape.data for shape in shapes)
    dividing = [replace(shape, global_batch=batch) for shape in shapes if batch % shape.data == 0]
    if not dividing:
        sizes = ", ".join(str(n) for n in sorted({shape.data for shape in shapes}))
        raise ValueError(f"--global-batch {batch} cannot be divided over {sizes} data-parallel ranks")
    return replace(asked, shapes=dividing)


def recomputation(name: str | None) -> Recompute | None:
    """What is computed again, by the name a user typed; None stays open.

    Raises:
        ValueError: for an unknown name.
    """
    known: dict[str, Recompute] = {known: known for known in RECOMPUTE}
    return None if name is None else find("--recompute", name, known)


def _cluster(machine: str | Cluster, devices: int, changes: dict[str, int]) -> Cluster:
    found = cluster(machine) if isinstance(machine, str) else machine
    if changes:
        found = override(found, **changes)
    if devices < 1:
        raise ValueError(f"--devices {devices}: give 1 or more")
    if devices > found.per_node and devices % found.per_node:
        nearest = max(1, round(devices / found.per_node)) * found.per_node
        raise ValueError(
            f"--devices {devices}: {found.name} has {found.per_node} devices on a node, so whole nodes are a multiple "
            f"of that (nearest: {nearest}); --per-node changes it"
        )
    return found


class _Sizes(NamedTuple):
    """One way to divide a model."""

    tensor: int
    pipeline: int
    context: int
    recompute: Recompute


def _sizes(machine: Cluster, devices: int, fixed: Fixed) -> list[_Sizes]:
    """All that fit what is given, with tensor parallelism within a node."""
    tensors = [fixed.tensor] if fixed.tensor else [2**i for i in range(4) if 2**i <= min(devices, machine.per_node)]
    pipelines = [fixed.pipeline] if fixed.pipeline else [p for p in _PIPELINES if p <= devices]
    recompute: Sequence[Recompute] = [fixed.recompute] if fixed.recompute else RECOMPUTE
    found = []
    for tensor, pipeline, again in itertools.product(tensors, pipelines, recompute):
        left, rest = divmod(devices, tensor * pipeline)
        contexts = [fixed.context] if fixed.context else [c for c in range(1, left + 1) if left % c == 0]
        found += [_Sizes(tensor, pipeline, c, again) for c in contexts if not rest and left and left % c == 0]
    return found


def _shape(found: Model, devices: int, seq_length: int, sizes: _Sizes) -> Parallel | str:
    """The shape, or why it cannot be."""
    several = sizes.tensor > 1
    try:
        shape = Parallel(devices=devices, sequence_parallel=several, seq_length=seq_length, **sizes._asdict())
        check(found, shape)
    except ValueError as error:
        return str(error)
    if seq_length % (2 * shape.context * shape.tensor):
        return (
            f"--seq-length {seq_length} is no multiple of {2 * shape.context * shape.tensor}: twice {shape.context} "
            f"context-parallel times {shape.tensor} tensor-parallel ranks"
        )
    return shape


def _nothing(devices: int, fixed: Fixed) -> str:
    sizes = {"--tensor": fixed.tensor, "--pipeline": fixed.pipeline, "--context": fixed.context}
    given = " x ".join(f"{flag} {n}" for flag, n in sizes.items() if n)
    return f"{given} does not divide it" if given else "none was found"
