"""The measurement on every rank: start all contestants, check each, then time them in turn.

In each round all contestants run once, each after a barrier, in rotating order. A contestant's time in a round is that
of its slowest rank, forward plus backward; with passes ``apart`` there is a barrier between the two.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import packs
import torch
import torch.distributed as dist
from network import Network
from ranks import run_in, sent_bytes
from rich.console import Console
from rich.progress import Progress

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention.calls import Inputs
from cp_plugin.cli.bench.cases import make_case
from cp_plugin.cli.bench.contestants import Contestant, Entry, Provided
from cp_plugin.cli.bench.ideal import random_parts
from cp_plugin.cli.bench.measure import Both, Call, Taken, errors, once, question, take_turns
from cp_plugin.comm import TraceMesh
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import oracle

_CHECKED_TOKENS = 8  # per rank
_CPU = torch.device("cpu")
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contestant, over all ranks."""

    entry: str
    settings: str
    notes: tuple[str, ...]
    errors: dict[str, float]
    """Relative error (norm) of out, dq, dk and dv against float64 on one device, on a short sequence."""
    allowed: float
    booked: tuple[int, int] | None
    """Least and most bytes sent by a rank, by the ledger; None for a contestant without one."""
    wire: int
    """Most bytes sent over one slow link, by its counter."""
    seconds: list[float]
    """Every round."""
    forwards: list[float]
    """The forward's share of these."""

    @property
    def correct(self) -> bool:
        return all(error <= self.allowed for error in self.errors.values())

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class _Reading(NamedTuple):
    """One rank's observations of a contestant."""

    settings: str
    notes: tuple[str, ...]
    errors: dict[str, float]
    """Over all ranks."""
    booked: int | None
    wire: int


def measure(
    network: Network,
    entries: Sequence[Entry],
    problem: Problem,
    *,
    rounds: int,
    timeout: float,
    apart: bool = False,
    bounds: Sequence[int] = (),
) -> list[Measured]:
    """Run all entries on a network; RankError if a rank fails. ``bounds``: of the documents, for ``OnPack`` entries."""
    asked = _asked(problem, entries[0].kind)

    def rank() -> tuple[list[_Reading], list[list[Both]]]:
        contestants = [_start(entry, problem, bounds) for entry in entries]
        return _run(contestants, entries, problem, asked, rounds, apart=apart)

    by_rank = run_in(network, rank, timeout=timeout)
    taken = [Taken.of(of_ranks) for of_ranks in zip(*(seconds for _, seconds in by_rank), strict=True)]
    of_entries = zip(*(readings for readings, _ in by_rank), strict=True)
    return [
        _joined(entry, ALLOWED[problem.dtype], readings, of_entry)
        for entry, readings, of_entry in zip(entries, of_entries, taken, strict=True)
    ]


class Alone(NamedTuple):
    """A contestant's computation without communication, on all ranks at once."""

    seconds: float
    """Of the slowest rank."""
    sent: int
    """Bytes that the busiest rank would send."""


def measure_alone(network: Network, entry: Entry, problem: Problem, *, timeout: float) -> Alone:
    """Computation of an entry, forward and backward: median of three."""

    def rank() -> tuple[list[float], int]:
        setup = entry.setup(problem)
        contestant = Provided(ContextParallel(setup, mesh=TraceMesh(setup.axes, dist.get_rank())), setup, problem)
        call = _call(contestant, problem)
        call(lambda: None)
        sent = contestant.booked()
        return [once(call, _CPU).total for _ in range(3)], sent

    times, sent = zip(*run_in(network, rank, timeout=timeout), strict=True)
    return Alone(statistics.median(map(max, zip(*times, strict=True))), max(sent))


def _asked(problem: Problem, kind: Kind) -> oracle.Case:
    """A short sequence with its reference; documents and windows span several ranks."""
    if problem.documents:
        bounds = packs.small(problem.size)
        return oracle.make_case(replace(problem, seq_length=bounds[-1]), kind, bounds)
    if problem.window is not None:
        divisor = 2 * problem.size
        tokens = divisor * -(-2 * max(problem.window) // divisor)
        return oracle.make_case(replace(problem, seq_length=tokens), kind)
    return question(make_case("causal" if problem.causal else "full", problem), kind, _CHECKED_TOKENS)


def _run(
    contestants: Sequence[Contestant],
    entries: Sequence[Entry],
    problem: Problem,
    asked: oracle.Case,
    rounds: int,
    *,
    apart: bool,
) -> tuple[list[_Reading], list[list[Both]]]:
    """This rank's readings and times."""
    with Progress(console=Console(stderr=True, quiet=dist.get_rank() != 0), transient=True) as progress:
        task = progress.add_task("starting", total=len(entries) * (rounds + 2))

        def shown(what: str, number: int) -> None:
            progress.update(task, description=f"{what} {entries[number]}", advance=1)

        found = []
        for number, contestant in enumerate(contestants):
            shown("checking", number)
            found.append(_check(contestant, asked))
        yield_to_network()
        calls = [_call(contestant, problem, apart=apart) for contestant in contestants]
        readings = []
        for number, contestant in enumerate(contestants):
            shown("warming up", number)
            booked, wire = _count(contestant, calls[number])
            readings.append(_Reading(contestant.settings, contestant.notes, found[number], booked, wire))
        return readings, take_turns(calls, rounds, _CPU, lambda number: shown("timing", number))


def _start(entry: Entry, problem: Problem, bounds: Sequence[int]) -> Contestant:
    if isinstance(entry, packs.OnPack):
        setup = entry.setup(problem)
        cp = ContextParallel(setup, group=dist.group.WORLD)
        return packs.Contestant(entry, cp, setup, (bounds, packs.small(problem.size)))
    if not entry.provided:
        return entry.peer(problem)
    setup = entry.setup(problem)
    return Provided(ContextParallel(setup, group=dist.group.WORLD), setup, problem)


def yield_to_network() -> None:
    """Lower the priority of this computing thread below Gloo's: a network card needs no processor."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _check(contestant: Contestant, asked: oracle.Case) -> dict[str, float]:
    """Relative error (norm) of every tensor over all ranks."""
    parts = Inputs(*(None if x is None else contestant.shard(x) for x in asked.inputs))
    found = errors(contestant.step(parts), map(contestant.shard, asked.want))
    return dict(zip(oracle.TENSORS, found, strict=False))


def _call(contestant: Contestant, problem: Problem, *, apart: bool = False) -> Call:
    """A forward and a backward on this rank's shard."""
    x = random_parts(problem, problem.seq_length // problem.size, _CPU)
    parts = Inputs(*(None if y is None else contestant.arranged(y) for y in x))

    def call(between: Callable[[], object]) -> None:
        def turn() -> None:
            if apart:
                dist.barrier()
            between()

        contestant.step(parts, turn)

    return call


def _count(contestant: Contestant, call: Call) -> tuple[int | None, int]:
    """Bytes of one untimed step, as booked and as counted by the link."""
    contestant.booked()
    dist.barrier()
    before = sent_bytes()
    call(lambda: None)
    dist.barrier()  # everything the peers wait for has been sent
    return contestant.booked(), sent_bytes() - before


def _joined(entry: Entry, allowed: float, readings: Sequence[_Reading], taken: Taken) -> Measured:
    booked = [r.booked for r in readings if r.booked is not None]
    return Measured(
        entry=str(entry),
        settings=readings[0].settings,
        notes=readings[0].notes,
        errors=readings[0].errors,
        allowed=allowed,
        booked=(min(booked), max(booked)) if booked else None,
        wire=max(r.wire for r in readings),
        seconds=list(taken.total),
        forwards=list(taken.forward),
    )
