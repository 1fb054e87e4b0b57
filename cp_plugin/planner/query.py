"""Planner queries: a model, a cluster and the ways to divide one over the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cp_plugin.engine.core.problem import Fp8
from cp_plugin.planner.candidates import ALL, Allowed
from cp_plugin.planner.machine.hardware import Cluster, cluster, override
from cp_plugin.planner.price import add_recomputation
from cp_plugin.planner.training.footprint import Footprint, footprint
from cp_plugin.planner.training.model import Model, model
from cp_plugin.planner.training.parallel import RECOMPUTE, Parallel, Recompute, check

_PIPELINES = (1, 2, 4, 8, 16)
MOST = 2**24
"""Tokens of an iteration where no batch is given: no published long-context training takes more at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Parallel sizes given by the user; None: to be searched."""

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    recompute: Recompute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query, however it was put: a model's name, flags, ``--cp-provider auto``, Python."""

    model: Model
    cluster: Cluster
    shapes: Sequence[Parallel]
    """Candidate divisions of the model over the devices, with each recomputation that may be chosen."""
    free: bool = False
    """Recomputation is open: also ``SELECTIONS``, and as few whole layers as the memory demands."""
    allowed: Allowed = ALL
    fp8: Sequence[Fp8 | None] = (None,)
    """Payload formats to consider; None: the model's dtype."""
    limit: float = 0.0
    """Usable bytes of device memory; 0: all of it."""

    @property
    def memory(self) -> float:
        """Usable bytes of device memory."""
        return self.limit or self.cluster.device.memory_bytes

    def fits(self, needs: Footprint) -> bool:
        return needs.total <= self.memory


def from_name(name: str, devices: int, seq_length: int, machine: str | Cluster, fixed: Fixed, **changes: int) -> Query:
    """Query for a catalogue model, with every division that is consistent with ``fixed``; ValueError for an unknown
    model or cluster, and sizes that fit nothing."""
    chosen, there = model(name), resize_cluster(machine, devices, changes)
    shapes: list[Parallel] = []
    reasons: dict[str, None] = {}
    for sizes in _sizes(there, devices, fixed):
        try:
            shape = Parallel(devices=devices, sequence_parallel=sizes["tensor"] > 1, seq_length=seq_length, **sizes)
            check(chosen, shape)
        except ValueError as error:
            reasons[str(error)] = None
            continue
        chunks = f"twice {shape.context} context-parallel x {shape.tensor} tensor-parallel ranks"
        if seq_length % (n := 2 * shape.context * shape.tensor):
            reasons[f"--seq-length {seq_length} is not a multiple of {n}, {chunks}"] = None
        else:
            shapes.append(shape)
    if not shapes:
        named = {"--tensor": fixed.tensor, "--pipeline": fixed.pipeline, "--context": fixed.context}
        product = " x ".join(f"{flag} {n}" for flag, n in named.items() if n)
        why = list(reasons)[:3] or [f"{product} does not divide the number of devices"]
        raise ValueError(f"cannot split {chosen.name} across {devices} devices: {'; '.join(why)}")
    return Query(model=chosen, cluster=there, shapes=shapes, free=fixed.recompute is None)


def join_documents(shape: Parallel, documents: Sequence[int]) -> Parallel:
    """The shape with a pack of these documents in place of a micro-batch."""
    batch = shape.global_batch // shape.micro_batch
    return replace(shape, documents=tuple(documents), seq_length=sum(documents), micro_batch=1, global_batch=batch)


def keep_fitting(query: Query, global_batch: int | None = None) -> Query:
    """Keep the shapes that may fit the memory (all if none does), with one common batch; ValueError for a batch that no
    shape can divide.

    global_batch: sequences per iteration; None: one per data-parallel rank of the shape with the most, but no more than
    ``MOST`` tokens.
    """
    shapes = list(query.shapes)
    fits = [s for s in shapes if query.fits(footprint(query.model, add_recomputation(s, stock=True)))] or shapes
    replicas = sorted({shape.data for shape in fits})
    if len(replicas) == 1 and global_batch is None:
        return replace(query, shapes=fits)
    most = max((n for n in replicas if n * shapes[0].seq_length <= MOST), default=replicas[0])
    batch = global_batch or most
    dividing = [replace(shape, global_batch=batch) for shape in fits if batch % shape.data == 0]
    if not dividing:
        sizes = ", ".join(map(str, replicas))
        raise ValueError(f"--global-batch {batch} must be a multiple of the data-parallel ranks, {sizes}")
    return replace(query, shapes=dividing)


def resize_cluster(machine: str | Cluster, devices: int, changes: dict[str, int]) -> Cluster:
    """The cluster with these changes; ValueError for an unknown one, and for devices that are not whole nodes."""
    resized = cluster(machine) if isinstance(machine, str) else machine
    if changes:
        resized = override(resized, **changes)
    if devices > resized.per_node and devices % resized.per_node:
        nearest = max(1, round(devices / resized.per_node)) * resized.per_node
        raise ValueError(
            f"--devices {devices}: {resized.name} has {resized.per_node} devices per node; use whole nodes, such as "
            f"--devices {nearest}, or change --per-node"
        )
    return resized


def _sizes(machine: Cluster, devices: int, fixed: Fixed) -> Iterator[dict[str, Any]]:
    """All sizes consistent with ``fixed``; tensor parallelism stays within a node."""
    tensors = [fixed.tensor] if fixed.tensor else [2**i for i in range(4) if 2**i <= min(devices, machine.per_node)]
    pipelines = [fixed.pipeline] if fixed.pipeline else [p for p in _PIPELINES if p <= devices]
    recompute: Sequence[Recompute] = [fixed.recompute] if fixed.recompute else RECOMPUTE
    for tensor, pipeline, again in itertools.product(tensors, pipelines, recompute):
        left, rest = divmod(devices, tensor * pipeline)
        for context in [fixed.context] if fixed.context else range(1, left + 1):
            if rest == 0 and left % context == 0:
                yield {"tensor": tensor, "pipeline": pipeline, "context": context, "recompute": again}
