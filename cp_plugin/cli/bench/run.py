"""What the ranks run: check every contestant, then time the correct ones in turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import Inputs
from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench import ideal, measure
from cp_plugin.cli.bench.cases import Case
from cp_plugin.cli.bench.contestants import Contestant, Entry, Provided
from cp_plugin.cli.bench.measure import Taken
from cp_plugin.cli.bench.results import CaseResult, Measured
from cp_plugin.core.options import Options
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.trace.timeline import simulate
from cp_plugin.testing import oracle, ranks
from cp_plugin.testing.verify import check_kernel, limits

WARM_UP = {"cuda": 2, "cpu": 1}
"""Untimed calls, in which CUDA kernels are compiled and memory is reserved."""
ALL_RANKS = 16
"""Up to this many ranks, all are simulated; beyond, the first, the middle and the last."""
_REFUSALS = (AssertionError, NotImplementedError, ValueError)
"""How libraries refuse what they cannot do, on all ranks alike."""


class Planned(NamedTuple):
    """A contestant on a case."""

    entry: Entry
    setup: Setup | None
    """None: a peer."""
    reason: str | None = None
    """Why it cannot run the case."""
    predicted: float | None = None
    """The planner's seconds for forward and backward, if a cluster was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One case with all its contestants."""

    case: Case
    planned: Sequence[Planned]

    @property
    def possible(self) -> list[Planned]:
        """The contestants that can run it."""
        return [one for one in self.planned if one.reason is None]


def plan(case: Case, entries: Sequence[Entry], device: str, cluster: Cluster | None = None) -> Plan:
    """Settle all options for a case, and predict the providers' times on a cluster.

    Raises:
        ValueError: for options that do not fit their provider or the number of ranks, or a cluster whose profile lacks
            figures that a prediction needs.
    """
    found = []
    for entry in entries:
        one = _planned(case, entry, device)
        if cluster is not None and one.setup is not None and one.reason is None:
            one = one._replace(predicted=_predicted(one.setup, case, cluster))
        found.append(one)
    return Plan(case=case, planned=found)


def _planned(case: Case, entry: Entry, device: str) -> Planned:
    if not entry.provided:
        return Planned(entry, None, entry.missing(device) or entry.unsupported(case.problem))
    try:
        setup = entry.setup(case.problem)
    except ValueError as error:
        if entry.options:
            raise ValueError(f"--provider {entry}: {error}") from None
        return Planned(entry, None, str(error))
    may_ask = device == "cpu" or dist.is_initialized()  # CUDA must not be touched before ranks are forked
    return Planned(entry, setup, setup.reason or (_no_kernel(setup, torch.device(device)) if may_ask else None))


def _no_kernel(setup: Setup, device: torch.device) -> str | None:
    """Why the kernel that was asked for cannot run it there, or None."""
    try:
        check_kernel(setup, device)
    except ValueError as error:
        return str(error)
    return None


def _predicted(setup: Setup, case: Case, cluster: Cluster) -> float:
    simulated = "all" if case.problem.size <= ALL_RANKS else "few"
    try:
        setup = replace(setup, problem=replace(setup.problem, bounds=case.bounds))
        return simulate(setup, setup.problem, cluster=cluster, ranks=simulated).seconds
    except ValueError as error:
        raise ValueError(f"--cluster {cluster.name}: {error}") from None


def bench(
    plans: Sequence[Plan], device: str, rounds: int, timeout: float, here: torch.device | None = None
) -> list[CaseResult]:
    """Run all plans, which are of one kind of attention.

    Args:
        device: ``cpu`` or ``cuda``.
        timeout: seconds for forked ranks.
        here: this rank's device, where it has joined others; None: ranks are forked.

    Raises:
        RankError: if a forked rank fails.
    """
    kinds = [one.entry.kind for p in plans for one in p.possible]
    if not kinds:
        return [_joined(p, ()) for p in plans]
    questions = [measure.question(p.case, kinds[0]) for p in plans]

    def rank(mine: torch.device) -> list[list[Measured]]:
        return _Rank(mine, rounds).run(plans, questions)

    found = ranks.run(rank, plans[0].case.problem.size, device, timeout, here)
    return [_joined(p, measured) for p, measured in zip(plans, found, strict=True)]


def _joined(plan: Plan, measured: Sequence[Measured]) -> CaseResult:
    """With what ranks do not send back: contestants that cannot run, setups, and predictions."""
    remaining, rows = iter(measured), []
    for one in plan.planned:
        row = next(remaining) if one.reason is None else Measured(name=str(one.entry), cannot=one.reason)
        rows.append(replace(row, setup=one.setup, predicted=one.predicted))
    return CaseResult(case=plan.case, measured=rows)


class _Rank:
    """One rank; all its methods are collective over the ranks."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._warm_up = WARM_UP[device.type]
        self._made: dict[tuple[str, Options], ContextParallel] = {}
        console = Console(stderr=True, quiet=dist.get_rank() != 0 or not sys.stderr.isatty())
        self._progress = Progress(console=console, transient=True)

    def run(self, plans: Sequence[Plan], questions: Sequence[oracle.Case]) -> list[list[Measured]]:
        """The measurements of all contestants that can run, in order; the same on all ranks."""
        steps = sum(len(p.possible) * (1 + self._warm_up + self._rounds) for p in plans)
        with self._progress:
            self._progress.add_task("starting", total=steps)
            return [self._case(p, asked) for p, asked in zip(plans, questions, strict=True)]

    def _shown(self, text: str) -> None:
        self._progress.update(self._progress.task_ids[0], description=text, advance=1)

    def _case(self, plan: Plan, asked: oracle.Case) -> list[Measured]:
        checked = [self._checked(one, asked, plan.case.mask_name) for one in plan.possible]
        right = [one for one, m in zip(plan.possible, checked, strict=True) if m.right]
        timed = iter(self._timed(plan.case, right) if right else ())
        return [replace(m, **next(timed)) if m.right else m for m in checked]

    def _checked(self, one: Planned, asked: oracle.Case, mask_name: str) -> Measured:
        """A contestant's errors on the short case."""
        self._shown(f"checking {one.entry}")
        try:
            contestant = self._start(one, asked)
            parts = Inputs(*(None if x is None else contestant.shard(x.to(self._device)) for x in asked.inputs))
            got = contestant.step(parts)
            errors = measure.errors(got, map(contestant.shard, asked.want))
        except Exception as error:  # of any library
            if one.setup is None and isinstance(error, _REFUSALS):
                return Measured(name=str(one.entry), cannot=f"upstream refuses: {error}")
            raise RuntimeError(f"{one.entry} fails on {mask_name}: {error}") from error
        return Measured(
            name=str(one.entry),
            settings=contestant.settings,
            why=contestant.notes,
            errors=dict(zip(oracle.TENSORS, errors, strict=False)),
            allowed=limits(one.setup, asked, self._device),
        )

    def _timed(self, case: Case, right: Sequence[Planned]) -> list[dict[str, object]]:
        """Bytes, times and ideal of each contestant: fields of ``Measured``."""
        tokens = case.problem.seq_length // case.problem.size
        contestants = [self._start(one, case) for one in right]
        calls: list[measure.Call] = []
        for contestant in contestants:
            whole = ideal.random_parts(case.problem, tokens, self._device)
            parts = Inputs(*(y if y is None or y.dim() == 1 else contestant.arranged(y) for y in whole))
            calls.append(partial(contestant.step, parts))
        shares = {_kernel(one): ideal.share(case, one.setup, self._device) for one in right}
        calls += [share.step for share in shares.values()]
        titles = [*(str(one.entry) for one in right), *("the ideal" for _ in shares)]

        def shown(number: int) -> None:
            self._shown(f"{case.mask_name}, {case.problem.seq_length} tokens: {titles[number]}")

        for _ in range(self._warm_up):
            for contestant in contestants:
                contestant.booked()
            measure.take_turns(calls, 1, self._device, shown)
        sent = measure.everywhere([contestant.booked() for contestant in contestants])
        seconds = measure.everywhere(measure.take_turns(calls, self._rounds, self._device, shown))
        taken = [list(of_ranks) for of_ranks in zip(*seconds, strict=True)]
        ideals = {
            key: Taken.of(of_ranks, share.factor)
            for (key, share), of_ranks in zip(shares.items(), taken[len(right) :], strict=True)
        }
        return [
            {
                "sent": None if None in by_rank else (min(by_rank), max(by_rank)),
                "taken": Taken.of(of_ranks),
                "ideal": ideals[_kernel(one)],
            }
            for one, by_rank, of_ranks in zip(right, zip(*sent, strict=True), taken[: len(right)], strict=True)
        ]

    def _start(self, one: Planned, case: Case | oracle.Case) -> Contestant:
        if one.setup is None:
            return one.entry.peer(case.problem)
        key = (one.setup.provider.name, one.setup.options)
        if key not in self._made:
            self._made[key] = ContextParallel(one.setup, group=dist.group.WORLD)
        return Provided(self._made[key], one.setup, case.problem, case.cu_seqlens)


def _kernel(one: Planned) -> tuple[str, ...]:
    """What decides the ideal: contestants with the same key share it."""
    if one.setup is None:
        return ("auto", "")
    options, linear = one.setup.options, one.setup.provider.kind == "linear"
    return (options.backend, one.setup.provider.name if linear else options.fp8 or "")
