"""What was measured, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench import Measured
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from scenarios import Scenario, Target

from cp_plugin.cli.bench.report import print_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A target and what was measured."""

    target: Target
    ratio: float
    correct: bool

    @property
    def met(self) -> bool:
        return self.correct and self.ratio >= self.target.at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One scenario, measured."""

    scenario: Scenario
    rate: int
    """Bits per second of every slow link, each way."""
    measured: Sequence[Measured]
    others: float
    """Share of the machine's processor time that other programs took meanwhile."""
    notes: Sequence[str] = ()
    """About the network, a sentence each."""

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the scenario's targets."""
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
        """The table, the reasons for what was chosen, and the verdicts."""
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
        """The conditions, in a line."""
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

    def as_json(self) -> dict[str, Any]:
        """Everything, with every round's time and the versions."""
        return {
            "title": self.title,
            "scenario": asdict(self.scenario),
            "rate": self.rate,
            "torch": torch.__version__,
            "commit": commit(),
            "others": self.others,
            "notes": list(self.notes),
            "measured": [{**asdict(m), "median": m.median, "correct": m.correct} for m in self.measured],
            "targets": [{**asdict(o.target), "ratio": o.ratio, "met": o.met} for o in self.outcomes],
        }

    def write_json(self, path: Path) -> None:
        """See ``as_json``."""
        path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def plot(self, path: Path) -> None:
        """A bar for every contestant: its median, and its fastest and slowest round."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.4 * len(self.measured)), layout="constrained")
        names, medians = [m.entry for m in self.measured], [m.median for m in self.measured]
        spread = [
            [m.median - min(m.seconds) for m in self.measured],
            [max(m.seconds) - m.median for m in self.measured],
        ]
        colours = ["tab:blue" if m.booked else "tab:grey" for m in self.measured]
        bars = axes.barh(names, medians, xerr=spread, color=colours, ecolor="black", capsize=2)
        axes.bar_label(bars, [f" {m.median:.2f} s" for m in self.measured], padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel("seconds, forward + backward (bar: median; whisker: fastest and slowest round)")
        axes.set_title(self.title.replace("; ", "\n", 1), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)


def commit() -> str | None:
    """The commit that is checked out, with a mark when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
