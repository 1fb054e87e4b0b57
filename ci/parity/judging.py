"""The verdict on a case: run its training runs, compare, and explain."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from launching import LAST_OUTPUT, Failed, Runner
from matrix import Case, Device, Matrix
from training import Gap, Record, differences, gap, worst

Result = Literal["PASS", "REFUSED", "FAIL"]
ROUNDING = 2.0**-23
"""One rounding of float32, in which loss and gradient norm are reported: their smallest limit."""
MARGIN = 2.0
"""Limit as a multiple of upstream's own gap."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """The result of a case."""

    case: Case
    result: Result = "FAIL"
    plugin: Gap | None = None
    upstream: dict[str, Gap] = field(default_factory=dict)
    """By upstream's methods; that of the measure is the largest of all seeds."""
    seeds: list[Gap] = field(default_factory=list)
    """The measure's gap for each seed."""
    cost: Gap | None = None
    """Effect of bfloat16 on the model on one rank, if twice of it is allowed as well."""
    limit: Gap | None = None
    measured_by: str = ""
    """The case whose upstream gap sets the limit, if it is another one."""
    note: str = ""


class Judge:
    """Judges cases of a matrix on one device, with the first ``seeds`` of its seeds (None: all)."""

    def __init__(self, matrix: Matrix, device: Device, runner: Runner, seeds: int | None = None) -> None:
        self._matrix, self._device, self._runner = matrix, device, runner
        self._further = matrix.seeds[:seeds]

    def judge(self, case: Case) -> Verdict:
        """Train and compare a case; a training run that fails is its note, and raises nothing."""
        verdict = Verdict(case=case)
        expected = self._matrix.refusal(case)
        try:
            if expected is not None:
                self._must_refuse(case, expected, verdict)
            else:
                self._must_agree(case, verdict)
        except (Failed, ValueError) as error:
            verdict.note = _error(str(error))
        return verdict

    def _must_refuse(self, case: Case, expected: str, verdict: Verdict) -> None:
        try:
            self._runner.once(self._matrix.plugin(case, self._device))
        except Failed as failed:
            if expected not in str(failed):
                raise
            verdict.result, verdict.note = "REFUSED", _error(str(failed))
            return
        verdict.note = f"it trained, and should have been refused: {expected}"

    def _must_agree(self, case: Case, verdict: Verdict) -> None:
        matrix, device = self._matrix, self._device
        stock = self._runner.run(matrix.stock(case, device))
        verdict.upstream = self._upstream(case)
        measure = matrix.measure(case, device)
        verdict.measured_by = "" if measure is case else measure.name
        verdict.seeds = self._seeds(measure)
        if measure is case:
            verdict.upstream[next(iter(verdict.upstream))] = largest(verdict.seeds)
        verdict.limit = allowed(largest(verdict.seeds))
        exact = matrix.exact(case, device)
        if exact is not None:
            verdict.cost = cost(stock, self._runner.run(matrix.stock(exact, device)))
            limit, rounded = verdict.limit, allowed(verdict.cost)
            verdict.limit = limit._replace(loss=max(limit.loss, rounded.loss), norm=max(limit.norm, rounded.norm))
        verdict.plugin = gap(self._runner.once(matrix.plugin(case, device)), stock)
        verdict.result = "PASS" if verdict.plugin.fits(verdict.limit) else "FAIL"
        reason = matrix.no_upstream(case, device) or matrix.models[case.model].wrong
        notes = [f"upstream: {reason}"] if reason is not None else []
        pairs = zip(Gap._fields[:3], verdict.plugin[:3], verdict.limit[:3], strict=True)
        notes += [f"{name} {value:.2e} off, allowed {limit:.2e}" for name, value, limit in pairs if not value <= limit]
        verdict.note = "; ".join(notes)

    def _upstream(self, case: Case) -> dict[str, Gap]:
        """Gaps of upstream's methods; raises for the first, which is the measure, and omits others that fail."""
        stock, gaps = self._runner.run(self._matrix.stock(case, self._device)), {}
        for name, training in self._matrix.upstream(case, self._device).items():
            try:
                gaps[name] = gap(self._runner.run(training), stock)
            except (Failed, ValueError):
                if not gaps:
                    raise
        return gaps

    def _seeds(self, case: Case) -> list[Gap]:
        """Upstream's gap with Megatron's seed and with each further one."""
        stock = self._matrix.stock(case, self._device)
        upstream = next(iter(self._matrix.upstream(case, self._device).values()))
        pairs = [(upstream, stock)]
        pairs += [(upstream.seeded(seed), stock.seeded(seed)) for seed in self._further]
        return [gap(self._runner.run(one), self._runner.run(other)) for one, other in pairs]


def allowed(gap: Gap) -> Gap:
    """Return the plugin's limit if this is upstream's gap."""
    return Gap(max(MARGIN * gap.loss, ROUNDING), max(MARGIN * gap.norm, ROUNDING), MARGIN * gap.grad)


def largest(seeds: Sequence[Gap]) -> Gap:
    """Upstream's gap over several seeds: loss and norm the largest, gradients of the first seed.

    A loss is one number: of two equally exact programs it may differ by nothing with one seed and by several roundings
    with the next. The gradient of a parameter is many numbers, so one seed is enough.
    """
    return seeds[0]._replace(loss=worst([gap.loss for gap in seeds]), norm=worst([gap.norm for gap in seeds]))


def cost(rounded: Sequence[Record], exact: Sequence[Record]) -> Gap:
    """Effect of a lower precision on loss and norm; 0 for the gradients, where it is no measure.

    Raises:
        ValueError: they are not comparable: different ranks or numbers of steps, or numbers that are not finite.
    """
    if [record.place for record in rounded] != [record.place for record in exact]:
        raise ValueError("not the same ranks in both precisions")
    pairs = list(zip(rounded, exact, strict=True))
    losses = [x for record, base in pairs for x in differences(record.losses, base.losses)]
    norms = [x for record, base in pairs for x in differences(record.norms, base.norms)]
    if not losses or not all(map(math.isfinite, losses + norms)):
        raise ValueError("no rank reported a loss, or one precision's loss or gradient norm is not finite")
    return Gap(worst(losses), worst(norms), 0.0)


def _error(text: str) -> str:
    """The error: the last line of a traceback, or the crash of a process, with the place and what it printed last."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if re.search("Error|^Fatal Python error", line.split(":", 1)[0])]
    last = (errors or lines or ["no output"])[-1]
    if not last.startswith("Fatal Python error"):
        return last
    after = lines[lines.index(last) :]
    more = (next((line for line in after if line.startswith(mark)), "") for mark in ("File ", LAST_OUTPUT))
    return "; ".join((last, *filter(None, more)))
