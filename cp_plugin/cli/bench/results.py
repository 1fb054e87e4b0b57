"""The measurements of a case: every contestant, and its ideal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench.cases import Case
from cp_plugin.cli.bench.measure import Both, Taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One contestant on one case."""

    name: str
    setup: Setup | None = None
    """None: a peer."""
    settings: str = ""
    why: Sequence[str] = ()
    """What was chosen for the user, and why."""
    cannot: str | None = None
    """Why it cannot run the case; nothing else is set then."""
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error (norm) of every tensor on a short sequence of the same kind, against float64 on one device."""
    allowed: dict[str, float] = field(default_factory=dict)
    sent: tuple[int, int] | None = None
    """Least and most bytes that a rank sends, forward and backward, by the ledger; None: it has no ledger."""
    taken: Taken | None = None
    """None: its results were wrong, so it was not timed."""
    ideal: Taken | None = None
    """Of its kernel: see ``cp_plugin.cli.bench.ideal``."""
    predicted: float | None = None
    """The planner's seconds for forward and backward."""

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
        """The ideal's seconds over its own: 1 is as fast as without communication, tiling and imbalance."""
        if self.taken is None or self.ideal is None:
            return None
        ideal, own = self.ideal.medians, self.taken.medians
        return Both(ideal.forward / own.forward, ideal.total / own.total)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One mask at one sequence length."""

    case: Case
    measured: Sequence[Measured]

    def flops(self, *, forward_only: bool) -> float:
        """Of the visible pairs on one rank, matrix products only: two forward, five backward."""
        p = self.case.problem
        forward = p.head_dim + p.v_head_dim
        backward = 0 if forward_only else 3 * p.head_dim + 2 * p.v_head_dim
        return 2 * self.case.pairs * p.batch * p.heads * (forward + backward) / p.size

    def flops_per_s(self, measured: Measured) -> Both | None:
        """Of a rank, forward alone and with the backward; None for linear attention, in which no pairs are computed,
        and for what was not timed."""
        linear = measured.setup is not None and measured.setup.provider.kind == "linear"
        if measured.taken is None or linear:
            return None
        forward, total = measured.taken.medians
        return Both(self.flops(forward_only=True) / forward, self.flops(forward_only=False) / total)
