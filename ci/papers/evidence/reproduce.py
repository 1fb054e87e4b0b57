"""Published rows beside predicted ones: parameters fitted to half of a machine's rows, errors on the other half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from cp_plugin.planner.names import find
from evidence import data, stacks
from evidence.data import Row
from evidence.experiment import predict
from evidence.fitting import minimise, misfit
from evidence.score import (
    LARGEST_ERROR,
    LEAST_RIGHT,
    Pairs,
    Predicted,
    fitted,
    median_error,
    pairs,
)
from evidence.stacks import PARAMETERS, Fit, Parameter, Stack

Said = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A parameter and what came of it."""

    paper: str
    cluster: str
    fit: Fit
    before: float
    """As it was assumed."""
    value: float
    rows: int
    """That it was fitted to."""

    @property
    def plausible(self) -> bool:
        """Whether hardware and software allow it."""
        low, high = self.fit.plausible
        return low * (1 - 1e-9) <= self.value <= high * (1 + 1e-9)

    @property
    def known(self) -> Parameter:
        """What it is of a machine."""
        return PARAMETERS[self.fit.parameter]

    def __str__(self) -> str:
        known = self.known
        low, high = (known.shown(x) for x in self.fit.plausible)
        verdict = "" if self.plausible else "; WARNING: outside"
        return (
            f"{self.cluster}: {self.fit.parameter} ({known.label}) = {known.shown(self.value)}, assumed "
            f"{known.shown(self.before)}, fitted to {self.rows} rows; plausible {low} to {high}: "
            f"{self.fit.why}{verdict}"
        )


@dataclass(frozen=True)
class Reproduction:
    """All rows of some papers."""

    names: tuple[str, ...]
    predicted: tuple[Predicted, ...]
    fitted: tuple[Fitted, ...]

    def of(self, name: str) -> Reproduction:
        """One paper's part."""
        return Reproduction(
            (name,),
            tuple(p for p in self.predicted if p.row.paper == name),
            tuple(f for f in self.fitted if f.paper == name),
        )

    @cached_property
    def judged(self) -> int:
        """Rows whose error counts."""
        return sum(p.judged for p in self.predicted)

    @cached_property
    def error(self) -> float:
        """Median absolute error of these."""
        return median_error(self.predicted)

    @cached_property
    def unfitted_error(self) -> float:
        """The same with nothing fitted."""
        return median_error(replace(p, value=p.unfitted) for p in self.predicted)

    @cached_property
    def pairs(self) -> Pairs:
        """Pairs of methods of these."""
        return pairs(self.predicted, held_out=True)

    @cached_property
    def all_pairs(self) -> Pairs:
        """Pairs of methods of all rows, with those that something was fitted to."""
        return pairs(self.predicted, held_out=False)

    @property
    def ok(self) -> bool:
        """Whether both limits are kept."""
        return self.judged > 0 and self.error <= LARGEST_ERROR and self.pairs.share >= LEAST_RIGHT

    def __str__(self) -> str:
        """``PASS``, or ``FAIL``, and why."""
        return (
            f"{'PASS' if self.ok else 'FAIL'} {', '.join(self.names)}: median error {100 * self.error:.1f} % on "
            f"{self.judged} held-out rows (limit {100 * LARGEST_ERROR:.0f} %), methods in the published order in "
            f"{self.pairs.right} of {self.pairs.all} pairs that differ by more than 10 % (limit "
            f"{100 * LEAST_RIGHT:.0f} %; {self.all_pairs.right} of {self.all_pairs.all} with the rows fitted to)"
        )


def names(asked: str) -> tuple[str, ...]:
    """The papers that are asked for: one, or ``all``.

    Raises:
        ValueError: for an unknown name; the message has the nearest ones.
    """
    found = find("paper", asked, {known: known for known in (*data.NAMES, "all")})
    return data.NAMES if found == "all" else (found,)


def reproduce(asked: Sequence[str], say: Said = lambda text: None) -> Reproduction:
    """Predict all rows of these papers.

    Args:
        asked: names of ``data.NAMES``.
        say: is told what is being done, a line for each machine.
    """
    predicted: list[Predicted] = []
    parameters: list[Fitted] = []
    for name in asked:
        rows = data.rows(name)
        chosen = fitted(rows)
        values: dict[str, tuple[float, ...]] = {}
        for cluster, stack in data.paper(name).clusters.items():
            say(f"{name}: {cluster}")
            own = [row for row, use in zip(rows, chosen, strict=True) if use and row.cluster == cluster]
            values[cluster] = fit(stack, own)
            before = stacks.assumed(stack)
            parameters += [
                Fitted(name, cluster, f, b, v, len(own))
                for f, b, v in zip(stack.fit, before, values[cluster], strict=True)
            ]
        for row, use in zip(rows, chosen, strict=True):
            value = unfitted = None
            if row.published is not None and not row.excuse:
                stack = data.paper(name).clusters[row.cluster]
                value = predict(row, stacks.machine(stack, values[row.cluster]))
                unfitted = predict(row, stacks.machine(stack, stacks.assumed(stack)))
            predicted.append(Predicted(row, value, fitted=use, unfitted=unfitted))
    return Reproduction(tuple(asked), tuple(predicted), tuple(parameters))


def fit(stack: Stack, rows: Sequence[Row]) -> tuple[float, ...]:
    """The values of the stack's parameters that fit these rows best, those of memory left out: it has none."""
    timed = [row for row in rows if row.figure != "GB"]
    if not stack.fit or not timed:
        return stacks.assumed(stack)
    published = [row.published or 0.0 for row in timed]

    def cost(values: tuple[float, ...]) -> float:
        machine = stacks.machine(stack, values)
        return misfit([predict(row, machine) for row in timed], published)

    return minimise(cost, [f.range for f in stack.fit])
