"""What all ranks do: ask every contestant for the right answer, then time those that have it, in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from cp_plugin.attention.api import ContextParallel
from cp_plugin.attention.calls import Inputs
from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench import gate, ideal, timing
from cp_plugin.cli.bench.contestant import Contestant, nothing
from cp_plugin.cli.bench.entries import Entry
from cp_plugin.cli.bench.masks import Case
from cp_plugin.cli.bench.results import CaseResult, Measured, Taken
from cp_plugin.core.options import Options
from cp_plugin.kernels import blocks
from cp_plugin.linear import kernels
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.oracle import Case as Asked
from cp_plugin.testing.ranks import join
from cp_plugin.testing.verify import limits

WARM_UP = 2
"""Untimed calls on CUDA, where kernels are compiled and memory is reserved; on the CPU one."""


_REFUSALS = (AssertionError, NotImplementedError, ValueError)
"""By which libraries say, on all ranks alike, that they cannot do what they are asked."""


class Planned(NamedTuple):
    """A contestant on a case."""

    entry: Entry
    setup: Setup | None
    """None: a peer."""
    reason: str | None
    """Why it cannot do the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One case with all who take part."""

    case: Case
    planned: Sequence[Planned]

    @property
    def possible(self) -> list[Planned]:
        """Those that can do it."""
        return [one for one in self.planned if one.reason is None]


def plan(case: Case, entries: Sequence[Entry], device: str) -> Plan:
    """Make all choices for a case.

    Raises:
        ValueError: for options that do not fit their provider or the number of ranks.
    """
    found = []
    for entry in entries:
        if not entry.provided:
            found.append(Planned(entry, None, entry.missing(device) or entry.unsupported(case.problem)))
            continue
        try:
            setup = entry.setup(case.problem)
        except ValueError as error:
            if entry.options:
                raise ValueError(f"--provider {entry}: {error}") from None
            found.append(Planned(entry, None, str(error)))
            continue
        may_ask = device == "cpu" or dist.is_initialized()  # CUDA must not be touched before ranks are forked
        reason = _no_kernel(setup, torch.device(device)) if setup.reason is None and may_ask else setup.reason
        found.append(Planned(entry, setup, reason))
    return Plan(case=case, planned=found)


def bench(
    plans: Sequence[Plan], device: str, rounds: int, timeout: float, here: torch.device | None = None
) -> list[CaseResult]:
    """Run all plans, in which one kind of attention takes part.

    Args:
        device: ``cpu`` or ``cuda``.
        timeout: seconds for forked ranks.
        here: this rank's device, where it has joined others; None: ranks are forked.

    Raises:
        RankError: if a forked rank fails.
    """
    kinds = [one.entry.kind for p in plans for one in p.possible]
    if not kinds:
        return [CaseResult(case=p.case, measured=[_refused(one) for one in p.planned]) for p in plans]
    questions = [gate.question(p.case, kinds[0]) for p in plans]

    def rank() -> list[list[Measured]]:
        return _Bench(here or join(device), rounds).run(plans, questions)

    found = rank() if here is not None else run_ranks(rank, plans[0].case.problem.size, timeout=timeout)[0]
    return [_joined(p, measured) for p, measured in zip(plans, found, strict=True)]


def _joined(plan: Plan, measured: Sequence[Measured]) -> CaseResult:
    """With what a rank does not send back: who could not take part, and providers."""
    remaining = iter(measured)
    rows = [replace(next(remaining), setup=one.setup) if one.reason is None else _refused(one) for one in plan.planned]
    return CaseResult(case=plan.case, measured=rows)


def _refused(one: Planned) -> Measured:
    return Measured(name=str(one.entry), setup=one.setup, cannot=one.reason)


def _no_kernel(setup: Setup, device: torch.device) -> str | None:
    """Why the kernel that was asked for cannot run it there, or None."""
    options, problem = setup.options, setup.problem
    try:
        if setup.provider.kind == "softmax":
            blocks.choose(options, problem, device)
        else:
            kernels.choose(options.backend, device, problem.dtype, problem.documents)
    except ValueError as error:
        return str(error)
    return None


class _Bench:
    """One rank."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._device, self._rounds = device, rounds
        self._warm_up = WARM_UP if device.type == "cuda" else 1
        self._made: dict[tuple[str, Options], ContextParallel] = {}
        self._shown: Callable[[str], object] = nothing

    def run(self, plans: Sequence[Plan], questions: Sequence[Asked]) -> list[list[Measured]]:
        """Of all who can take part, in order; collective over all ranks, which get the same."""
        steps = sum(len(p.possible) * (1 + self._warm_up + self._rounds) for p in plans)
        console = Console(stderr=True, quiet=dist.get_rank() != 0 or not sys.stderr.isatty())
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("starting", total=steps)
            self._shown = lambda text: progress.update(task, description=text, advance=1)
            return [self._case(p, asked) for p, asked in zip(plans, questions, strict=True)]

    def _case(self, plan: Plan, asked: Asked) -> list[Measured]:
        checked = [self._checked(one, asked, plan.case.mask_name) for one in plan.possible]
        right = [one for one, m in zip(plan.possible, checked, strict=True) if _is_right(m)]
        timed = iter(self._timed(plan.case, right) if right else ())
        return [replace(m, **next(timed)) if _is_right(m) else m for m in checked]

    def _checked(self, one: Planned, asked: Asked, mask_name: str) -> Measured:
        """Its errors on the short case."""
        self._shown(f"checking {one.entry}")
        setup = one.setup
        try:
            contestant = self._start(one, asked)
            squares = gate.squares(contestant, asked, self._device)
        except Exception as error:  # of any library
            if setup is None and isinstance(error, _REFUSALS):
                return Measured(name=str(one.entry), cannot=f"upstream refuses: {error}")
            raise RuntimeError(f"{one.entry} fails on {mask_name}: {error}") from error
        return Measured(
            name=str(one.entry),
            settings=contestant.settings if setup is None else ", ".join(filter(None, (setup.layout, str(setup)))),
            why=contestant.notes if setup is None else setup.why,
            errors=gate.errors(gate.everywhere(squares)),
            allowed=limits(setup, asked, self._device),
        )

    def _timed(self, case: Case, right: Sequence[Planned]) -> list[dict[str, Any]]:
        """What it takes each of them, and its ideal; fields of ``Measured``."""
        tokens = case.problem.seq_length // case.problem.size
        contestants = [self._start(one, case) for one in right]
        calls: list[timing.Call] = []
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
            timing.take_turns(calls, 1, self._device, shown)
        sent = gate.everywhere([contestant.booked() for contestant in contestants])
        seconds = gate.everywhere(timing.take_turns(calls, self._rounds, self._device, shown))
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

    def _start(self, one: Planned, case: Case | Asked) -> Contestant:
        if one.setup is None:
            return one.entry.start(case.problem)
        key = (one.setup.provider.name, one.setup.options)
        if key not in self._made:
            self._made[key] = ContextParallel(one.setup, group=dist.group.WORLD)
        return one.entry.start(case.problem, self._made[key], case.cu_seqlens)


def _is_right(measured: Measured) -> bool:
    return measured.cannot is None and not measured.wrong


def _kernel(one: Planned) -> tuple[str, ...]:
    """Contestants with the same have the same ideal."""
    if one.setup is None:
        return ("auto", "")
    options, linear = one.setup.options, one.setup.provider.kind == "linear"
    return (options.backend, one.setup.provider.name if linear else options.fp8 or "")
