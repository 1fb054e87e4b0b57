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
from typing import Any

import packs
import torch
import torch.distributed as dist
from network import Network
from ranks import run_in, sent_bytes
from rich.console import Console
from rich.progress import Progress
from scenarios import ALLOWED, Scenario

from cp_plugin import ContextParallel, Problem
from cp_plugin.attention.calls import Inputs
from cp_plugin.cli.bench.cases import make_case
from cp_plugin.cli.bench.contestants import Contestant, Entry, Provided, random_parts
from cp_plugin.cli.bench.run import question, relative_errors
from cp_plugin.methods.protocol import Kind
from cp_plugin.testing import oracle
from cp_plugin.testing.clock import Both, Call, Taken, take_turns

_CHECKED_TOKENS = 8  # per rank
_CPU = torch.device("cpu")


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


def measure(network: Network, scenario: Scenario, *, rounds: int, timeout: float) -> list[Measured]:
    """Run all contestants of a scenario on a network; RankError if a rank fails."""
    entries, problem, bounds = scenario.entries(), scenario.problem(), scenario.bounds()
    asked = _asked(problem, entries[0].kind)

    def rank() -> tuple[list[dict[str, Any]], list[list[Both]]]:
        contestants = [_start(entry, problem, bounds) for entry in entries]
        return _run(contestants, scenario, asked, rounds)

    readings, times = zip(*run_in(network, rank, timeout=timeout), strict=True)
    measured = []
    for entry, of_ranks, both in zip(entries, zip(*readings, strict=True), zip(*times, strict=True), strict=True):
        booked = [one["booked"] for one in of_ranks if one["booked"] is not None]
        taken = Taken.of(both)
        found = of_ranks[0] | {
            "booked": (min(booked), max(booked)) if booked else None,
            "wire": max(one["wire"] for one in of_ranks),
            "seconds": list(taken.total),
            "forwards": list(taken.forward),
        }
        measured.append(Measured(entry=str(entry), allowed=ALLOWED[problem.dtype], **found))
    return measured


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
    contestants: Sequence[Contestant], scenario: Scenario, asked: oracle.Case, rounds: int
) -> tuple[list[dict[str, Any]], list[list[Both]]]:
    """This rank's readings, fields of ``Measured``, and its times."""
    with Progress(console=Console(stderr=True, quiet=dist.get_rank() != 0), transient=True) as progress:
        task = progress.add_task("starting", total=len(contestants) * (rounds + 2))

        def shown(what: str, number: int) -> None:
            progress.update(task, description=f"{what} {scenario.runs[number]}", advance=1)

        checked = []
        for number, contestant in enumerate(contestants):
            shown("checking", number)
            checked.append(_check(contestant, asked))
        yield_to_network()
        calls = [_call(contestant, scenario.problem(), apart=scenario.apart) for contestant in contestants]
        readings = []
        for number, contestant in enumerate(contestants):
            shown("warming up", number)
            booked, wire = _count(contestant, calls[number])
            reading = {"settings": contestant.settings, "notes": contestant.notes, "errors": checked[number]}
            readings.append(reading | {"booked": booked, "wire": wire})
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
    found = relative_errors(contestant.step(parts), map(contestant.shard, asked.want))
    return dict(zip(oracle.tensors(asked.problem), found, strict=False))


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
