"""The measurements of every contestant and its ideal, as JSON and as tables of the same rows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from rich.console import Console

from cp_plugin.engine.attention.calls import Setup
from cp_plugin.engine.common.text import show_bytes, show_seconds
from cp_plugin.engine.core.problem import Problem
from cp_plugin.testing.clock import Both, Taken
from cp_plugin.tools.bench.cases import mask_name, pairs
from cp_plugin.tools.bench.contestants import Entry
from cp_plugin.tools.flags import replace_megatron_flags
from cp_plugin.tools.output import print_lines, print_table
from cp_plugin.tools.tables import describe, problem_as_json

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
    """Of its kernel: see ``cp_plugin.tools.bench.contestants``."""
    predicted: float | None = None
    """The planner's seconds for forward and backward."""

    @property
    def linear(self) -> bool:
        return self.setup is not None and self.setup.provider.kind == "linear"

    @property
    def wrong(self) -> bool:
        """Return True if an error is above its limit."""
        return any(not error <= self.allowed[name] for name, error in self.errors.items())

    def as_json(self, p: Problem) -> dict[str, Any]:
        """All figures; rates of a rank, forward and in total, are those of the matrix products of visible pairs, two
        forward and five backward, and None for linear attention, which computes no pairs."""
        row: dict[str, Any] = {"name": str(self.entry)}
        if self.cannot is not None:
            return row | {"cannot": replace_megatron_flags(self.cannot)}
        row |= {"cannot": None, "settings": self.settings}
        row |= {"correct": not self.wrong, "errors": self.errors, "allowed": self.allowed}
        if self.taken is None or self.ideal is None:
            return row
        own, ideal = self.taken.medians, self.ideal.medians
        forward, backward = p.head_dim + p.v_head_dim, 3 * p.head_dim + 2 * p.v_head_dim
        work = 2 * pairs(p) * p.batch * p.heads / p.size
        rate = Both(work * forward / own.forward, work * (forward + backward) / own.total)
        return row | {
            "sent": None if self.sent is None else {"least": self.sent[0], "most": self.sent[1]},
            "seconds": self.taken._asdict(),
            "median": own._asdict(),
            "ideal": self.ideal._asdict(),
            "of_ideal": {"forward": ideal.forward / own.forward, "total": ideal.total / own.total},
            "flops_per_s": None if self.linear else rate._asdict(),
            "predicted": self.predicted,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One mask at one sequence length."""

    problem: Problem
    measured: Sequence[Measured]

    @property
    def possible(self) -> list[Measured]:
        """The contestants that can run it."""
        return [m for m in self.measured if m.cannot is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All cases and their common conditions."""

    results: Sequence[CaseResult]
    device: str
    rounds: int
    cluster: str | None = None
    """Of the predictions."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Peers that are not available here -> why."""
    others: float = 0.0
    """Share of processor time that other programs used during the run."""

    @property
    def _measured(self) -> list[Measured]:
        return [m for result in self.results for m in result.measured]

    @property
    def ok(self) -> bool:
        """Return True if something was timed, and nothing was wrong."""
        return any(m.taken for m in self._measured) and not any(m.wrong for m in self._measured)

    @property
    def verdict(self) -> str:
        """Say how many were timed, wrong, and refused."""
        every = self._measured
        wrong, refused = sum(m.wrong for m in every), sum(m.cannot is not None for m in every)
        parts = [f"{sum(m.taken is not None for m in every)} of {len(every)} timed"]
        parts += [f"{wrong} WRONG, not timed"] if wrong else []
        parts += [f"{refused} cannot run, for the reasons given"] if refused else []
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return the conditions, and all contestants of every case."""
        return {
            "ok": self.ok,
            "torch": torch.__version__,
            "device": self.device,
            "rounds": self.rounds,
            "cluster": self.cluster,
            "left_out": dict(self.left_out),
            "others": self.others,
            "cases": [
                {
                    "mask": mask_name(of.problem),
                    "problem": problem_as_json(of.problem),
                    "bounds": list(of.problem.bounds),
                    "pairs": pairs(of.problem),
                    "contestants": [m.as_json(of.problem) for m in of.measured],
                }
                for of in self.results
            ],
        }

    def print(self, console: Console) -> None:
        """Print a table for each case."""
        for of in self.results:
            rows = [_cells(m.as_json(of.problem)) for m in of.measured]
            title = f"{mask_name(of.problem)} on {self.device}, {self.rounds} rounds: {describe(of.problem)}"
            print_table(console, title, COLUMNS, rows)
        print_table(console, "", COLUMNS, [((name, f"cannot: {why}"), "dim") for name, why in self.left_out.items()])
        print_lines(console, EXPLAINED, style="dim")
        if self.others > BUSY:
            text = f"other programs used {self.others:.0%} of the processors: measure again on a quiet machine"
            print_lines(console, text, style="yellow")


def _cells(row: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    if row["cannot"] is not None:
        return (row["name"], f"cannot: {row['cannot']}"), "dim"
    worst = max(row["errors"], key=lambda name: row["errors"][name] / row["allowed"][name])
    error = f"{worst} {row['errors'][worst]:.1e}"
    if "seconds" not in row:
        return (row["name"], row["settings"], f"WRONG: {error}"), "red"
    sent, speed = row["sent"] or {}, row["flops_per_s"]
    bytes_sent = " to ".join(dict.fromkeys(map(show_bytes, sent.values()))) or "no ledger"
    unit, prefix = (1e12, "T") if speed and speed["total"] >= 1e12 else (1e9, "G")
    return (
        row["name"],
        row["settings"],
        error,
        bytes_sent,
        show_seconds(row["median"]["forward"]),
        show_seconds(row["median"]["total"]),
        "" if speed is None else f"{', '.join(f'{x / unit:.3g}' for x in speed.values())} {prefix}",
        ", ".join(f"{share:.0%}" for share in row["of_ideal"].values()),
        "" if row["predicted"] is None else show_seconds(row["predicted"]),
    ), ""


class Processors:
    """Processor time of other programs: that of all since construction, less this process and its finished children."""

    def __init__(self) -> None:
        self._start, self._busy = time.monotonic(), _others()

    def others(self) -> float:
        """Return the share of processor time that other programs used."""
        whole = (time.monotonic() - self._start) * (os.cpu_count() or 1)
        return max(0.0, _others() - self._busy) / whole


def _others() -> float:
    """Seconds of other programs, without interrupts, which carry our packets."""
    times, (user, system, of_children, in_system, _) = psutil.cpu_times(), os.times()
    return times.user + times.nice + times.system - (user + system + of_children + in_system)
