"""The measurements of a case: every contestant, and its ideal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench.cases import Case
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.testing.clock import Both, Taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contestant on one case; before the run only ``entry``, ``setup``, ``cannot`` and ``predicted`` are set."""

    entry: Entry
    setup: Setup | None = None
    """None: a peer, or options that do not fit."""
    settings: str = ""
    why: Sequence[str] = ()
    """The reasons for chosen options."""
    cannot: str | None = None
    """Why it cannot run the case; nothing is measured then."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error (norm) of every tensor on a short sequence of the same kind, against float64 on one device."""
    allowed: dict[str, float] = field(default_factory=dict)
    sent: tuple[int, int] | None = None
    """Least and most bytes that a rank sends, forward and backward, by the ledger; None: it keeps no ledger."""
    taken: Taken | None = None
    """None: not timed, since its results were wrong."""
    ideal: Taken | None = None
    """Of its kernel: see ``cp_plugin.cli.bench.ideal``."""
    predicted: float | None = None
    """The planner's seconds for forward and backward."""

    @property
    def name(self) -> str:
        return str(self.entry)

    @property
    def linear(self) -> bool:
        return self.setup is not None and self.setup.provider.kind == "linear"

    @property
    def wrong(self) -> bool:
        """Whether an error is above its limit."""
        return any(not error <= self.allowed[name] for name, error in self.errors.items())

    @property
    def right(self) -> bool:
        """Whether it can run the case, and its results are right."""
        return self.cannot is None and not self.wrong

    @property
    def worst(self) -> str:
        """The tensor closest to its limit, or furthest beyond it."""
        return max(self.errors, key=lambda name: self.errors[name] / self.allowed[name])

    @property
    def of_ideal(self) -> Both | None:
        """The ideal's seconds over its own: 1 means no cost of communication, tiling and imbalance."""
        if self.taken is None or self.ideal is None:
            return None
        ideal, own = self.ideal.medians, self.taken.medians
        return Both(ideal.forward / own.forward, ideal.total / own.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One mask at one sequence length."""

    case: Case
    measured: Sequence[Measured]

    @property
    def possible(self) -> list[Measured]:
        """The contestants that can run it."""
        return [m for m in self.measured if m.cannot is None]

    def flops_per_s(self, measured: Measured) -> Both | None:
        """A rank's rate, forward and in total: the matrix products of visible pairs, two forward and five backward.

        None for linear attention, which computes no pairs, and for contestants that were not timed.
        """
        if measured.taken is None or measured.linear:
            return None
        p = self.case.problem
        forward, backward = p.head_dim + p.v_head_dim, 3 * p.head_dim + 2 * p.v_head_dim
        work = 2 * self.case.pairs * p.batch * p.heads / p.size
        seconds = measured.taken.medians
        return Both(work * forward / seconds.forward, work * (forward + backward) / seconds.total)
