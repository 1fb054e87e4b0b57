"""What every rank of a cluster does: start all contestants, check each, then time them in turn.

Every contestant gets the same q, k, v and dout. Rounds alternate: in each one all contestants run once, each after a
barrier, and the order turns by one. A contestant's time in a round is that of its slowest rank, forward plus backward;
with passes ``apart`` there is a barrier between the two.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from network import Network
from ranks import run_in, sent_bytes
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from cp_plugin import ContextParallel, Options, Problem
from cp_plugin.attention.calls import Inputs
from cp_plugin.cli.bench.contestant import Contestant, Provided, nothing
from cp_plugin.cli.bench.entries import Entry
from cp_plugin.comm import TraceMesh
from cp_plugin.methods import registry as providers
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing.oracle import linear_reference

_CHECKED_TOKENS = 8  # per rank
FIELDS = ("out", "dq", "dk", "dv")
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class _Squares(NamedTuple):
    """Sums of squares of one rank: of the error and of the reference."""

    error: float
    reference: float


@dataclass(slots=True, kw_only=True)
class _Reading:
    """What one rank saw of one contestant."""

    settings: str
    notes: tuple[str, ...]
    squares: list[_Squares]
    booked: int | None = None
    wire: int = 0
    seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contestant, over all ranks."""

    entry: str
    settings: str
    notes: tuple[str, ...]
    errors: dict[str, float]
    """Relative error (norm) of out, dq, dk and dv against a float64 reference on one device, small shape."""
    allowed: float
    booked: tuple[int, int] | None
    """Least and most bytes a rank sent, by the ledger; None for a contestant without one."""
    wire: int
    """Most bytes that left one slow link, by its own counter."""
    seconds: list[float]
    """Every round."""

    @property
    def correct(self) -> bool:
        return all(error <= self.allowed for error in self.errors.values())

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    network: Network, entries: Sequence[Entry], problem: Problem, *, rounds: int, timeout: float, apart: bool = False
) -> list[Measured]:
    """Run all entries on a network, in their order; RankError when a rank fails."""
    reference = _reference(_small(problem), entries[0].kind)

    def rank() -> list[_Reading]:
        return _run(entries, problem, reference, rounds, dist.barrier if apart else nothing)

    ranks = run_in(network, rank, timeout=timeout)
    return [
        _joined(entry, problem, readings) for entry, readings in zip(entries, zip(*ranks, strict=True), strict=True)
    ]


class Alone(NamedTuple):
    """What a contestant does on each rank itself, all ranks at work."""

    seconds: float
    """To compute, on the slowest rank."""
    sent: int
    """Bytes that the busiest rank would send meanwhile."""


def measure_alone(network: Network, entry: Entry, problem: Problem, *, timeout: float) -> Alone:
    """The computation of one entry, forward and backward, without communication: median of three."""

    def rank() -> tuple[list[float], int]:
        contestant = _alone(entry, problem, dist.get_rank())
        parts = Inputs(*(contestant.shard(x) for x in _inputs(problem)))
        contestant.step(parts)
        sent = contestant.booked()
        return [_seconds(contestant, parts, nothing) for _ in range(3)], sent

    times, sent = zip(*run_in(network, rank, timeout=timeout), strict=True)
    return Alone(statistics.median(map(max, zip(*times, strict=True))), max(sent))


def _alone(entry: Entry, problem: Problem, rank: int) -> Provided:
    """The computation and the ledger of one rank of a provider, without its peers."""
    found = providers.settle(entry.name, problem, Options(**dict(entry.options)))
    return Provided(ContextParallel(found, mesh=TraceMesh(found.axes, rank)), problem)


def _run(
    entries: Sequence[Entry], problem: Problem, reference: list[Tensor], rounds: int, between: Callable[[], object]
) -> list[_Reading]:
    shown = Console(stderr=True, quiet=dist.get_rank() != 0)
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("starting", total=len(entries) * (rounds + 2))
        contestants = [entry.start(problem) for entry in entries]
        readings = []
        for entry, contestant in zip(entries, contestants, strict=True):
            progress.update(task, description=f"checking {entry}", advance=1)
            squares = _check(contestant, _small(problem), reference)
            readings.append(_Reading(settings=contestant.settings, notes=contestant.notes, squares=squares))
        yield_to_network()
        parts = _parts(contestants, problem)
        for i, entry in enumerate(entries):
            progress.update(task, description=f"warming up {entry}", advance=1)
            _count(contestants[i], parts[i], readings[i])
        for turn in range(rounds):
            for i in (*range(turn % len(entries), len(entries)), *range(turn % len(entries))):
                progress.update(task, description=f"timing {entries[i]}", advance=1)
                readings[i].seconds.append(_seconds(contestants[i], parts[i], between))
    return readings


def yield_to_network() -> None:
    """Let this thread, which computes, wait for those that Gloo has started: a network card needs no processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _parts(contestants: Sequence[Contestant], problem: Problem) -> list[Inputs]:
    """This rank's inputs, for each contestant; of the whole ones, one is there at a time."""
    found: list[list[Tensor]] = [[] for _ in contestants]
    for whole in _inputs(problem):
        for parts, contestant in zip(found, contestants, strict=True):
            parts.append(contestant.shard(whole).clone())  # not a view of the whole
    return [Inputs(*parts) for parts in found]


def _check(contestant: Contestant, problem: Problem, reference: list[Tensor]) -> list[_Squares]:
    got = contestant.step(Inputs(*(contestant.shard(x) for x in _inputs(problem))))
    want = [contestant.shard(x) for x in reference]
    return [
        _Squares((a.double() - b).square().sum().item(), b.square().sum().item())
        for a, b in zip(got, want, strict=True)
    ]


def _count(contestant: Contestant, parts: Inputs, reading: _Reading) -> None:
    """One untimed step: what it sends, as booked and as counted by the link."""
    contestant.booked()
    dist.barrier()
    before = sent_bytes()
    contestant.step(parts)
    dist.barrier()  # what the peers still wait for has left
    reading.wire, reading.booked = sent_bytes() - before, contestant.booked()


def _seconds(contestant: Contestant, parts: Inputs, between: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    contestant.step(parts, between)
    return time.perf_counter() - start


def _joined(entry: Entry, problem: Problem, readings: Sequence[_Reading]) -> Measured:
    errors = {}
    for i, name in enumerate(FIELDS):
        error = sum(r.squares[i].error for r in readings) / sum(r.squares[i].reference for r in readings)
        errors[name] = error**0.5 if error == error else float("inf")
    booked = [r.booked for r in readings if r.booked is not None]
    return Measured(
        entry=str(entry),
        settings=readings[0].settings,
        notes=readings[0].notes,
        errors=errors,
        allowed=ALLOWED[problem.dtype],
        booked=(min(booked), max(booked)) if booked else None,
        wire=max(r.wire for r in readings),
        seconds=[max(times) for times in zip(*(r.seconds for r in readings), strict=True)],
    )


def _small(problem: Problem) -> Problem:
    """The same call on few tokens."""
    return Problem(
        size=problem.size,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        seq_length=_CHECKED_TOKENS * problem.size,
        dtype=problem.dtype,
        causal=problem.causal,
    )


def _inputs(problem: Problem) -> Iterator[Tensor]:
    """q, k, v and dout of the whole sequence, ``[s, 1, heads, d]``, the same on every rank."""
    g = torch.Generator().manual_seed(0)
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(problem.seq_length, problem.batch, h, problem.head_dim) for h in heads]
    return (torch.randn(*shape, generator=g).to(problem.dtype) for shape in shapes)


def _reference(problem: Problem, kind: Kind) -> list[Tensor]:
    """out, dq, dk and dv on one device in float64: by torch's own attention, or one token after the other."""
    if kind == "linear":
        return list(linear_reference(Inputs(*_inputs(problem)), problem))
    q, k, v, dout = (x.double() for x in _inputs(problem))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=problem.causal, enable_gqa=True
    ).permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
