"""Right first: every contestant on a short sequence of the same kind, against attention on one device in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_plugin.attention import calls
from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import Inputs, shapes
from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench.contestant import Contestant
from cp_plugin.cli.bench.masks import Case
from cp_plugin.core.options import Options
from cp_plugin.kernels import blocks
from cp_plugin.methods import fp8
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing.oracle import TENSORS, linear_reference, reference, relative_errors
from cp_plugin.testing.verify import HALF_FACTOR, LIMITS, of_sums

TOKENS = 32
"""Of a rank."""


class Question(NamedTuple):
    """A short case, its inputs, and the right answer: whole sequences, on the CPU."""

    case: Case
    inputs: Inputs
    want: tuple[Tensor, ...]
    """In float64: see ``cp_plugin.testing.oracle.TENSORS``."""


class Squares(NamedTuple):
    """Sums of squares of one rank: of the error and of the reference."""

    error: float
    reference: float


def question(case: Case, kind: Kind) -> Question:
    """A short sequence of the same kind, the same on every call."""
    short = case.small(TOKENS * case.problem.size)
    problem, generator = short.problem, torch.Generator().manual_seed(0)
    q, k, v, dout, decay = (
        None if like is None else torch.randn(like.shape, generator=generator, dtype=torch.float64)
        for like in shapes(problem, problem.seq_length)
    )
    x = Inputs(*(y.to(problem.dtype) for y in (q, k, v, dout)), None if decay is None else -decay.abs())
    if kind == "softmax":
        return Question(short, x, reference(*x[:4], causal=problem.causal, seen=seen(short)))
    return Question(short, x, _linear(x, short))


def seen(case: Case) -> Tensor:
    """Which keys each query sees, by window and documents: bool ``[s, s]``."""
    position = torch.arange(case.problem.seq_length)
    before = position.unsqueeze(1) - position
    left, right = case.problem.window or (-1, -1)
    found = torch.ones_like(before, dtype=torch.bool)
    if left >= 0:
        found &= before <= left
    if right >= 0:
        found &= -before <= right
    for start, end in pairwise(case.bounds):
        inside = (position >= start) & (position < end)
        found &= inside.unsqueeze(1) == inside
    return found


def squares(contestant: Contestant, asked: Question, device: torch.device) -> list[Squares]:
    """Of every tensor of ``TENSORS``, on this rank; collective over all ranks."""
    parts = Inputs(*(None if x is None else contestant.shard(x.to(device)) for x in asked.inputs))
    got = contestant.step(parts)
    found = []
    for mine, whole in zip(got, asked.want, strict=True):
        found.append(compared(mine, contestant.shard(whole)))
    return found


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


def allowed(setup: Setup | None, asked: Question, device: torch.device) -> dict[str, float]:
    """The largest error allowed of each tensor, as ``cp-plugin verify`` has it.

    Args:
        setup: of a provider; None: a peer.
    """
    problem = asked.case.problem
    if problem.dtype in LIMITS:
        return dict.fromkeys(TENSORS[: len(asked.want)], LIMITS[problem.dtype])
    options = Options() if setup is None else setup.options
    if setup is not None and setup.provider.kind == "linear":
        got = _linear_alone(setup, asked, device)
    else:
        sent = fp8.four_bits if options.fp8 is not None else torch.clone
        inputs = tuple(sent(x.to(device)) for x in asked.inputs[:4])
        kernel = blocks.choose(options, problem, device).kernel
        got = tuple(map(sent, calls.of_kernel(kernel, inputs, asked.case.mask, sent)))
    rounding = {} if setup is None else of_sums(setup)
    limits = {
        name: HALF_FACTOR * error + rounding.get(name, 0.0) for name, error in relative_errors(got, asked.want).items()
    }
    if "dlog_decay" in limits:  # never in half precision
        limits["dlog_decay"] = LIMITS[torch.float32]
    return limits


def _linear(x: Inputs, case: Case) -> tuple[Tensor, ...]:
    """The recurrence, document by document."""
    bounds = case.bounds or (0, case.problem.seq_length)
    parts = [
        linear_reference(Inputs(*(None if y is None else y if y.dim() == 1 else y[start:end] for y in x)), case.problem)
        for start, end in pairwise(bounds)
    ]
    return tuple(torch.cat(of_documents) for of_documents in zip(*parts, strict=True))


def _linear_alone(setup: Setup, asked: Question, device: torch.device) -> tuple[Tensor, ...]:
    """The same provider on one rank."""
    cp = ContextParallel(setup.provider, backend=setup.options.backend)
    whole = Inputs(*(None if x is None else x.to(device).detach().requires_grad_() for x in asked.inputs))
    return calls.through_autograd(cp, whole, replace(asked.case.problem, size=1), cu_seqlens=asked.case.cu_seqlens)
