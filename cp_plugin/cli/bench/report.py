"""The measurements of every contestant and its ideal, as tables and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from cp_plugin.attention.setups import Setup
from cp_plugin.cli.bench.cases import Case
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.cli.flags import in_our_flags
from cp_plugin.cli.tables import problem_as_json
from cp_plugin.cli.terminal import print_lines, print_table
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.core.dtypes import dtype_name
from cp_plugin.core.problem import Problem
from cp_plugin.testing.clock import Both, Taken

COLUMNS = ("contestant", "settings", "worst error", "sent", "forward", "both", "FLOP/s", "of ideal", "predicted")
BUSY = 0.1
"""Share of processor time that other programs may use before a warning."""
EXPLAINED = (
    "both: forward and backward; times are medians of the slowest rank; FLOP/s per rank and share of ideal: forward, "
    "both; ideal: a rank's share of the work in one call of the same kernel, without communication"
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All cases and their common conditions."""

    results: Sequence[CaseResult]
    device: str
    rounds: int
    seed: int
    cluster: str | None = None
    """Of the predictions."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that are not available here -> why."""
    others: float = 0.0
    """Share of processor time that other programs used during the run."""

    @property
    def ok(self) -> bool:
        """Something was timed, and nothing was wrong."""
        measured = [m for result in self.results for m in result.measured]
        return any(m.taken for m in measured) and not any(m.wrong for m in measured)

    @property
    def verdict(self) -> str:
        measured = [m for result in self.results for m in result.measured]
        wrong, refused = sum(m.wrong for m in measured), sum(m.cannot is not None for m in measured)
        parts = [f"{sum(m.taken is not None for m in measured)} of {len(measured)} timed"]
        parts += [f"{wrong} WRONG, not timed"] if wrong else []
        parts += [f"{refused} cannot run, for the reasons given"] if refused else []
        return "; ".join(parts)

    def print(self, console: Console) -> None:
        for result in self.results:
            rows = [(self._cells(result, m), _style(m)) for m in result.measured]
            print_table(console, self._title(result), COLUMNS, rows)
        print_notes(console, (EXPLAINED, *self._left_out()), self.others)

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "torch": torch.__version__,
            "device": self.device,
            "rounds": self.rounds,
            "seed": self.seed,
            "cluster": self.cluster,
            "left_out": dict(self.left_out),
            "others": self.others,
            "cases": [_case_as_json(result) for result in self.results],
        }

    def _left_out(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        return [f"left out: {', '.join(found)}: {reason}" for reason, found in by_reason.items()]

    def _title(self, result: CaseResult) -> str:
        case, decay = result.case, result.case.problem.decay
        described = f" ({case.described})" if case.described else ""
        of_keys = "" if decay == "none" else f", {decay} decay"
        return f"{case.mask_name}{described}{of_keys}: {conditions(case.problem, self.device, self.rounds)}"

    @staticmethod
    def _cells(result: CaseResult, m: Measured) -> tuple[str, ...]:
        if m.cannot is not None:
            return (m.name, f"cannot: {in_our_flags(m.cannot)}")
        error = f"{m.worst} {m.errors[m.worst]:.1e}"
        if m.wrong or m.taken is None:
            return (m.name, m.settings, f"WRONG: {error}")
        low, high = (in_bytes(n) for n in m.sent) if m.sent is not None else ("no ledger", "no ledger")
        medians, share = m.taken.medians, m.of_ideal
        return (
            m.name,
            m.settings,
            error,
            low if low == high else f"{low} to {high}",
            in_seconds(medians.forward),
            in_seconds(medians.total),
            _speed(result.flops_per_s(m)),
            "" if share is None else f"{share.forward:.0%}, {share.total:.0%}",
            "" if m.predicted is None else in_seconds(m.predicted),
        )


def conditions(problem: Problem, device: str, rounds: int) -> str:
    """The conditions of a measurement, for the title of its table."""
    p = problem
    sizes = str(p.head_dim) if p.head_dim == p.v_head_dim else f"{p.head_dim} and {p.v_head_dim}"
    return (
        f"{p.seq_length} tokens, batch {p.batch}, heads {p.heads}:{p.kv_heads} of {sizes}, {dtype_name(p.dtype)}; "
        f"{p.size} ranks on {device}, {rounds} rounds"
    )


def print_notes(console: Console, lines: Sequence[str], others: float) -> None:
    """How to read the tables, and a warning if other programs used too much processor time."""
    print_lines(console, *lines, style="dim")
    if others > BUSY:
        text = f"other programs used {others:.0%} of the processors during the run: measure again on a quiet machine"
        print_lines(console, text, style="yellow")


def _style(m: Measured) -> str:
    return "red" if m.wrong else "dim" if m.cannot is not None else ""


def _speed(flops: Both | None) -> str:
    if flops is None:
        return ""
    unit, prefix = (1e12, "T") if flops.total >= 1e12 else (1e9, "G")
    return f"{flops.forward / unit:.3g}, {flops.total / unit:.3g} {prefix}"


def _case_as_json(result: CaseResult) -> dict[str, Any]:
    case = result.case
    return {
        "mask": case.mask_name,
        "problem": problem_as_json(case.problem),
        "distribution": case.distribution,
        "bounds": list(case.bounds),
        "pairs": case.pairs,
        "contestants": [_measured_as_json(result, m) for m in result.measured],
    }


def _measured_as_json(result: CaseResult, m: Measured) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": m.name, "cannot": None if m.cannot is None else in_our_flags(m.cannot)}
    if m.cannot is not None:
        return entry
    entry |= {"settings": m.settings, "why": list(m.why), "correct": not m.wrong}
    entry |= {"errors": m.errors, "allowed": m.allowed}
    if m.taken is None or m.ideal is None:
        return entry
    speed, share = result.flops_per_s(m), m.of_ideal
    return entry | {
        "sent": None if m.sent is None else {"least": m.sent[0], "most": m.sent[1]},
        "seconds": m.taken._asdict(),
        "median": m.taken.medians._asdict(),
        "ideal": m.ideal._asdict(),
        "of_ideal": None if share is None else share._asdict(),
        "flops_per_s": None if speed is None else speed._asdict(),
        "predicted": m.predicted,
    }
