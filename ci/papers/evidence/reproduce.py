"""Reproduction of published rows in several ways, none of which has seen the table it is judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from cp_plugin.common.names import find
from evidence import data, fitting, stacks
from evidence.data import Kind, Row
from evidence.score import Predicted, Way, in_order, median_error, neighbours, ratio_error
from evidence.stacks import Fit

Said = Callable[[str], None]
TIMES: tuple[Kind, ...] = ("ratios", "absolute times")
ZERO_FIT, PAPER_LEFT_OUT, ORDER = 0.10, 0.15, 0.85
"""Targets: median errors of times, and the share of pairs of methods in the published order."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A machine's parameter and its fitted values."""

    paper: str
    cluster: str
    fit: Fit
    before: float
    """As assumed."""
    values: tuple[float, ...]
    """Each with another table left out."""


@dataclass(frozen=True, slots=True)
class Aim:
    """An accuracy target."""

    name: str
    value: float
    limit: float
    least: bool = False
    """The limit is a minimum."""

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.least else self.value <= self.limit

    def __str__(self) -> str:
        missed = f", missed by {100 * abs(self.value - self.limit):.1f} points"
        return (
            f"{'PASS' if self.reached else 'FAIL'} {self.name}: {100 * self.value:.1f} % (aim: at "
            f"{'least' if self.least else 'most'} {100 * self.limit:.1f} %{'' if self.reached else missed})"
        )


@dataclass(frozen=True)
class Reproduction:
    """All rows of some papers."""

    names: tuple[str, ...]
    predicted: tuple[Predicted, ...]
    fitted: tuple[Fitted, ...]
    shared: Mapping[str, tuple[float, ...]]
    """Paper -> values of ``stacks.SHARED`` fitted to all others."""

    def of(self, name: str) -> Reproduction:
        """One paper's part."""
        return Reproduction(
            (name,),
            tuple(p for p in self.predicted if p.row.paper == name),
            tuple(f for f in self.fitted if f.paper == name),
            {name: self.shared[name]},
        )

    @property
    def parts(self) -> list[Reproduction]:
        """By paper, and of all if there are several."""
        return [*map(self.of, self.names), *([self] if len(self.names) > 1 else [])]

    @property
    def title(self) -> str:
        return data.paper(self.names[0]).title if len(self.names) == 1 else "all"

    def kinds(self, *kinds: Kind) -> list[Predicted]:
        return [p for p in self.predicted if p.row.kind in kinds]

    @cached_property
    def times(self) -> list[Predicted]:
        """Rows of times, as ratios or absolute."""
        return self.kinds(*TIMES)

    def papers_alike(self, way: Way) -> float:
        """Median of the papers' own median errors of times."""
        return median(median_error(self.of(name).times, way) or 0.0 for name in self.names)

    @cached_property
    def aims(self) -> tuple[Aim, ...]:
        """Targets for times that have rows."""
        found = [
            _aim("median error with zero fit", median_error(self.times, "zero fit"), ZERO_FIT),
            _aim("median error with a paper left out", median_error(self.times, "a paper left out"), PAPER_LEFT_OUT),
        ]
        both = [p for p in self.times if "copied: another table" in p.values]
        copied = median_error(both, "copied: another table")
        if copied is not None:
            name = f"median error with zero fit where another table has such a row ({len(both)}), not above a copy's"
            found.append(_aim(name, median_error(both, "zero fit"), copied))
        order = in_order(self.times, "zero fit")
        if order.all:
            found.append(Aim(f"methods in the published order ({order} pairs)", order.share, ORDER, least=True))
        return tuple(aim for aim in found if aim is not None)

    @property
    def ok(self) -> bool:
        """Whether all aims are reached."""
        return bool(self.aims) and all(aim.reached for aim in self.aims)

    def worth(self, way: Way) -> float:
        """Median error of predicted ratios of two methods in one setting."""
        return ratio_error(self.times, way) or 0.0

    def __str__(self) -> str:
        """``PASS`` or ``FAIL``, and which of the aims."""
        reached = sum(aim.reached for aim in self.aims)
        return f"{'PASS' if self.ok else 'FAIL'} {', '.join(self.names)}: {reached} of {len(self.aims)} aims reached"


def names(asked: str) -> tuple[str, ...]:
    """Expand a paper's name or ``all``; ValueError with the nearest names for an unknown one."""
    found = find("paper", asked, {known: known for known in (*data.NAMES, "all")})
    return data.NAMES if found == "all" else (found,)


def reproduce(asked: Sequence[str], say: Said = lambda text: None) -> Reproduction:
    """Predict all rows of the papers ``asked``; ``say`` is a progress callback."""
    every = [row for name in data.NAMES for row in data.rows(name)]
    predicted: list[Predicted] = []
    parameters: list[Fitted] = []
    shared: dict[str, tuple[float, ...]] = {}
    for name in asked:
        say(f"{name}: what other papers tell")
        shared[name] = fitting.with_a_paper_left_out(name, every)
        own = [row for row in every if row.paper == name]
        values: dict[tuple[str, str], tuple[float, ...]] = {}
        for cluster, stack in data.paper(name).clusters.items():
            say(f"{name}: {cluster}")
            tables = dict.fromkeys(row.table for row in own if row.cluster == cluster)
            fits = {table: fitting.with_a_table_left_out(name, cluster, table, own) for table in tables}
            values |= {(cluster, table): found for table, found in fits.items()}
            for i, (fit, before) in enumerate(zip(stack.fit, stacks.assumed(stack), strict=True)):
                found = tuple(value[i] for value in fits.values() if value)
                parameters.append(Fitted(name, cluster, fit, before, found))
        predicted += [_predicted(row, values.get((row.cluster, row.table), ()), shared[name], every) for row in own]
    return Reproduction(tuple(asked), tuple(predicted), tuple(parameters), shared)


def _predicted(row: Row, own: tuple[float, ...], shared: tuple[float, ...], every: Sequence[Row]) -> Predicted:
    if row.published is None or row.excuse:
        return Predicted(row)
    values: dict[Way, float] = {
        "zero fit": fitting.predicted(row),
        "a table left out": fitting.predicted(row, own),
        "a paper left out": fitting.predicted(row, (), shared),
    }
    return Predicted(row, values | (neighbours(row, every) if row.counts else {}))


def _aim(name: str, value: float | None, limit: float) -> Aim | None:
    return None if value is None else Aim(name, value, limit)
