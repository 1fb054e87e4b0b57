"""The result of a scenario, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench import Measured
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scenarios import Scenario, Target

from cp_plugin.cli.bench.report import print_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A target and the measured ratio."""

    target: Target
    ratio: float
    correct: bool

    @property
    def met(self) -> bool:
        return self.correct and self.ratio >= self.target.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Measurements of one scenario."""

    scenario: Scenario
    rate: int
    """Bits per second of every slow link, each way."""
    measured: Sequence[Measured]
    others: float
    """Share of processor time taken by other programs."""
    notes: Sequence[str] = ()
    """Sentences about the network."""

    @property
    def outcomes(self) -> list[Outcome]:
        by_name = {m.entry: m for m in self.measured}
        return [
            Outcome(
                target=target,
                ratio=by_name[target.slow].median / by_name[target.fast].median,
                correct=by_name[target.fast].correct,
            )
            for target in self.scenario.targets
            if target.fast in by_name and target.slow in by_name
        ]

    @property
    def ok(self) -> bool:
        """Every contestant correct, every target met."""
        return all(m.correct for m in self.measured) and all(outcome.met for outcome in self.outcomes)

    def print(self, console: Console) -> None:
        """Print the table, notes and verdicts."""
        console.print(self._table())
        for note in self.notes:
            console.print(note, style="dim", markup=False, highlight=False)
        for m in self.measured:
            for note in m.notes:
                console.print(f"{m.entry}: {note}", style="dim", markup=False, highlight=False)
        print_notes(console, (), self.others)
        for outcome in self.outcomes:
            t, verdict = outcome.target, "PASS" if outcome.met else "FAIL"
            text = f"{verdict} {t.fast} is {outcome.ratio:.2f}x as fast as {t.slow} (wanted: {t.at_least:g}x)"
            console.print(text, style="green" if outcome.met else "bold red", markup=False, highlight=False)

    def _table(self) -> Table:
        baseline = self.measured[0]
        table = Table("contestant", "settings", title=self.title)
        right = ("error", "sent per rank, MB", "over one link, MB", "seconds", f"speed of {baseline.entry}")
        for column in right:
            table.add_column(column, justify="right")
        for m in self.measured:
            worst = max(m.errors, key=lambda name: m.errors[name])
            error = f"{m.errors[worst]:.1e}" if m.correct else f"WRONG: {worst} {m.errors[worst]:.1e}"
            low, high = (f"{n / 1e6:.2f}" for n in m.booked) if m.booked else ("", "")
            sent = "no ledger" if not m.booked else low if low == high else f"{low} to {high}"
            speed = f"{baseline.median / m.median:.2f}x"
            cells = (error, sent, f"{m.wire / 1e6:.2f}", f"{m.median:.2f}", speed)
            table.add_row(escape(m.entry), escape(m.settings), *cells, style=None if m.correct else "red")
        return table

    @property
    def title(self) -> str:
        """The conditions in one line."""
        s = self.scenario
        cards = f", one link per {s.nic}" if s.ranks_per_node > 1 else ""
        heads = f"{s.heads} heads" if s.kv_heads in (None, s.heads) else f"{s.heads}:{s.kv_heads} heads"
        return (
            f"{s.nodes} nodes x {s.ranks_per_node}{cards}, {self.rate / 1e6:.4g} Mbit/s; {s.seq} tokens, {heads} x "
            f"{s.head_dim}, {s.dtype}, {self._mask}; "
            f"{'forward, then backward' if s.apart else 'forward + backward'}, "
            f"medians of {len(self.measured[0].seconds)}"
        )

    @property
    def _mask(self) -> str:
        s = self.scenario
        window = f", a window of {s.window + 1}" if s.window is not None else ""
        packed = f", {len(s.bounds()) - 1} documents ({s.documents})" if s.documents else ""
        return f"{'causal' if s.causal else 'full'}{window}{packed}"
