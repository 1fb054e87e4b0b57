"""Run a benchmark on all ranks: check every contestant, then time the correct ones in turn."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Inputs, Setup
from cp_plugin.engine.comm.every_rank import gather_objects
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods.protocol import Kind
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.trace.timeline import simulate
from cp_plugin.testing import clock, oracle, ranks
from cp_plugin.testing.verify import check_kernel, limits
from cp_plugin.tools.bench.cases import mask_name, shortened
from cp_plugin.tools.bench.contestants import Contestant, Entry, Provided, random_parts, share
from cp_plugin.tools.bench.report import CaseResult, Measured

WARM_UP = {"cuda": 2, "cpu": 1}
"""Untimed calls, in which CUDA kernels are compiled and memory is reserved."""
ALL_RANKS = 16
"""Up to this many ranks, all are simulated; beyond, the first, the middle and the last."""
TESTED = 32
"""Tokens of a rank in the test case."""
_REFUSALS = (AssertionError, NotImplementedError, ValueError)
"""How libraries refuse what they cannot do, on all ranks alike."""


def plan(problem: Problem, entries: Sequence[Entry], device: str, cluster: Cluster | None = None) -> CaseResult:
    """Settle all options, and predict the providers' times on a cluster; nothing is measured yet. ValueError for
    options that do not fit their provider or the number of ranks, or a cluster whose profile lacks figures that a
    prediction needs."""
    return CaseResult(problem=problem, measured=[_planned(problem, entry, device, cluster) for entry in entries])


def _planned(problem: Problem, entry: Entry, device: str, cluster: Cluster | None) -> Measured:
    if not entry.provided:
        return Measured(entry=entry, cannot=entry.missing(device) or entry.unsupported(problem))
    try:
        setup = entry.setup(problem)
    except ValueError as error:
        if entry.options:
            raise ValueError(f"--provider {entry}: {error}") from None
        return Measured(entry=entry, cannot=str(error))
    reason = setup.reason
    if reason is None and (device == "cpu" or dist.is_initialized()):  # no CUDA before ranks are forked
        try:
            check_kernel(setup, torch.device(device))
        except ValueError as error:
            reason = str(error)
    predicted = None if cluster is None or reason is not None else _predicted(setup, problem, cluster)
    return Measured(entry=entry, setup=setup, cannot=reason, predicted=predicted)


def _predicted(setup: Setup, problem: Problem, cluster: Cluster) -> float:
    simulated = "all" if problem.size <= ALL_RANKS else "few"
    try:
        setup = replace(setup, problem=replace(setup.problem, bounds=problem.bounds))
        return simulate(setup, cluster=cluster, ranks=simulated).seconds
    except ValueError as error:
        raise ValueError(f"--cluster {cluster.name}: {error}") from None


def bench(
    plans: Sequence[CaseResult], device: str, rounds: int, timeout: float, own_device: torch.device | None = None
) -> list[CaseResult]:
    """Measure all plans, which are of one kind of attention; RankError if a forked rank fails.

    Args:
        device: ``cpu`` or ``cuda``.
        timeout: seconds for forked ranks.
        own_device: this rank's, if it has joined others; None: ranks are forked.
    """
    kinds = [m.entry.kind for p in plans for m in p.possible]
    if not kinds:
        return list(plans)
    questions = [question(p.problem, kinds[0]) for p in plans]
    size = plans[0].problem.size
    fields = ranks.run(lambda own: Rank(own, rounds).run(plans, questions), size, device, timeout, own_device)
    return [filled(p, of_possible) for p, of_possible in zip(plans, fields, strict=True)]


def filled(plan: CaseResult, measured: Iterable[dict[str, Any]]) -> CaseResult:
    """The plan with the fields that ``Rank.run`` returns of its contestants that can run."""
    remaining = iter(measured)
    return replace(plan, measured=[m if m.cannot is not None else replace(m, **next(remaining)) for m in plan.measured])


class Rank:
    """One rank; all methods are collective. Results are fields of ``Measured``: setups hold functions, which no rank
    can send."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._made: dict[tuple[str, Options], ContextParallel] = {}
        console = Console(stderr=True, quiet=dist.get_rank() != 0 or not sys.stderr.isatty())
        self._status = console.status("starting")

    def run(self, plans: Sequence[CaseResult], questions: Sequence[oracle.Case]) -> list[list[dict[str, Any]]]:
        """The measurements of all contestants that can run, in order; the same on all ranks."""
        with self._status:
            return [self._case(p, case) for p, case in zip(plans, questions, strict=True)]

    def _case(self, plan: CaseResult, case: oracle.Case) -> list[dict[str, Any]]:
        checked = [(m, self._checked(m, case)) for m in plan.possible]
        after = [(m, replace(m, **fields)) for m, fields in checked]
        right = [m for m, now in after if now.cannot is None and not now.wrong]
        timed = dict(zip((m.entry for m in right), self.timed(plan.problem, right) if right else (), strict=True))
        return [fields | timed.get(m.entry, {}) for m, fields in checked]

    def _checked(self, one: Measured, case: oracle.Case) -> dict[str, Any]:
        """Measure a contestant's errors on the short case."""
        self._status.update(f"checking {one.entry}")
        try:
            contestant = self.start(one, case.problem)
            parts = Inputs(*(None if x is None else contestant.shard(x.to(self._device)) for x in case.inputs))
            errors = relative_errors(contestant.step(parts), map(contestant.shard, case.want))
        except Exception as error:  # of any library
            if one.setup is None and isinstance(error, _REFUSALS):
                return {"cannot": f"upstream refuses: {error}"}
            raise RuntimeError(f"{one.entry} fails on {mask_name(case.problem)}: {error}") from error
        return {
            "settings": contestant.settings,
            "errors": dict(zip(oracle.tensors(case.problem), errors, strict=False)),
            "allowed": limits(one.setup, case, self._device),
        }

    def timed(self, problem: Problem, right: Sequence[Measured]) -> list[dict[str, Any]]:
        """Measure bytes, times and ideal of each contestant."""
        tokens = problem.seq_length // problem.size
        contestants = [self.start(one, problem) for one in right]
        calls: list[clock.Call] = []
        for contestant in contestants:
            whole = random_parts(problem, tokens, self._device)
            parts = Inputs(*(y if y is None or y.dim() == 1 else contestant.arranged(y) for y in whole))
            calls.append(partial(contestant.step, parts))
        shares = {_kernel(one): share(problem, one.setup, self._device) for one in right}
        calls += [share.step for share in shares.values()]
        titles = [*(str(one.entry) for one in right), *("the ideal" for _ in shares)]

        def shown(number: int) -> None:
            self._status.update(f"{mask_name(problem)}, {problem.seq_length} tokens: {titles[number]}")

        for _ in range(WARM_UP[self._device.type]):
            for contestant in contestants:
                contestant.booked()
            clock.take_turns(calls, 1, self._device, shown)
        sent = gather_objects([contestant.booked() for contestant in contestants])
        seconds = gather_objects(clock.take_turns(calls, self._rounds, self._device, shown))
        taken = [list(of_ranks) for of_ranks in zip(*seconds, strict=True)]
        ideals = {
            key: clock.Taken.from_rounds(of_ranks, share.factor)
            for (key, share), of_ranks in zip(shares.items(), taken[len(right) :], strict=True)
        }
        return [
            {
                "sent": None if None in by_rank else (min(by_rank), max(by_rank)),
                "taken": clock.Taken.from_rounds(of_ranks),
                "ideal": ideals[_kernel(one)],
            }
            for one, by_rank, of_ranks in zip(right, zip(*sent, strict=True), taken[: len(right)], strict=True)
        ]

    def start(self, one: Measured, problem: Problem) -> Contestant:
        if one.setup is None:
            return one.entry.peer(problem)
        key = (one.setup.provider.name, one.setup.options)
        if key not in self._made:
            self._made[key] = ContextParallel(one.setup, group=dist.group.WORLD)
        return Provided(self._made[key], one.setup, problem)


def _kernel(one: Measured) -> tuple[str, ...]:
    """The key of the ideal: contestants with the same kernel share one."""
    if one.setup is None:
        return ("auto", "")
    options = one.setup.options
    return (options.backend, one.setup.provider.name if one.linear else options.fp8 or "")


def question(problem: Problem, kind: Kind) -> oracle.Case:
    """The test case that every contestant must pass: a short sequence of the same kind with the expected results,
    deterministic."""
    return oracle.make_case(shortened(problem, TESTED * problem.size), kind)


def relative_errors(got: Iterable[Tensor], want: Iterable[Tensor]) -> list[float]:
    """Relative errors (norm) of sharded tensors; infinite if a shard is not finite or has a wrong shape. Collective."""
    squares = []
    for shard, wanted in zip(got, (x.double() for x in want), strict=True):
        error = (shard.cpu().double() - wanted).square().sum().item() if shard.shape == wanted.shape else torch.inf
        squares.append((error, wanted.square().sum().item()))
    of_ranks = torch.tensor(gather_objects(squares), dtype=torch.float64)
    error, norm = of_ranks.sum(0).unbind(1)
    return (error / norm).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf).tolist()
