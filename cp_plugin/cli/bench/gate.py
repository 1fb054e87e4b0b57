"""Right first: every contestant on a short sequence of the same kind, against attention on one device in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.attention.calls import Inputs
from cp_plugin.cli.bench.contestant import Contestant
from cp_plugin.cli.bench.masks import Case
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import oracle
from cp_plugin.testing.oracle import TENSORS

TOKENS = 32
"""Of a rank."""


class Squares(NamedTuple):
    """Sums of squares of one rank: of the error and of the reference."""

    error: float
    reference: float


def question(case: Case, kind: Kind) -> oracle.Case:
    """A short sequence of the same kind, the same on every call."""
    short = case.small(TOKENS * case.problem.size)
    return oracle.make_case(short.problem, kind, short.bounds)


def squares(contestant: Contestant, asked: oracle.Case, device: torch.device) -> list[Squares]:
    """Of every tensor of ``TENSORS``, on this rank; collective over all ranks."""
    parts = Inputs(*(None if x is None else contestant.shard(x.to(device)) for x in asked.inputs))
    got = contestant.step(parts)
    return [compared(mine, contestant.shard(whole)) for mine, whole in zip(got, asked.want, strict=True)]


def compared(got: Tensor, want: Tensor) -> Squares:
    """Infinite for a tensor of another shape."""
    wanted = want.double()
    error = (got.cpu().double() - wanted).square().sum().item() if got.shape == want.shape else torch.inf
    return Squares(error, wanted.square().sum().item())


def errors(of_ranks: Sequence[Sequence[Squares]]) -> dict[str, float]:
    """Relative error (norm) of every tensor over all ranks."""
    return {name: relative(parts) for name, parts in zip(TENSORS, zip(*of_ranks, strict=True), strict=False)}


def relative(of_ranks: Sequence[Squares]) -> float:
    """The error (norm) of a tensor that is divided over all ranks; infinite where a number is not finite."""
    error, norm = (sum(column) for column in zip(*of_ranks, strict=True))
    return (error / norm) ** 0.5 if error == error else torch.inf


def everywhere[T](mine: T) -> list[T]:
    """The same of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
