"""Verdicts for people: a table in the terminal, a page in Markdown, a plot; and for programs, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from comparing import MARGIN, ROUNDING, Gap
from judging import Verdict
from rich.table import Table

COLUMNS = ("case", "", "loss", "gradient norm", "gradients", "allowed", "of it", "golden", "result")
STYLES = {"PASS": "green", "REFUSED": "cyan", "FAIL": "bold red"}
LEGEND = (
    "Differences to a training without context parallelism: of loss and gradient norm the largest of all steps, over "
    "the power of two below the value; of the gradients in step 1 that of the worst parameter, norm over norm. "
    f"Allowed, for gradients: {MARGIN:g} times upstream's own, in the same run; so for loss and norm, but at least "
    f"{ROUNDING:.1e}, one rounding of a float32."
)


def rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Lines of a table: upstream's, each of them, and the plugin's below."""
    name = verdict.case.name
    for which, gap in verdict.upstream.items():
        yield name, which, *_numbers(gap), "", "", "", ""
        name = ""
    limit = verdict.limit
    allowed, share = "", ""
    if limit is not None and verdict.plugin is not None:
        allowed = f"{limit.grad:.1e}" + (" *" if verdict.measured_by else "")
        share = f"{verdict.plugin.grad / limit.grad:.0%}" if limit.grad else ""
    yield name, "plugin", *_numbers(verdict.plugin), allowed, share, verdict.golden[:5], verdict.result


def table(verdicts: Sequence[Verdict], device: str) -> Table:
    """For the terminal."""
    found = Table(*COLUMNS, title=f"Plugin beside upstream, each against one rank, on {device}", caption=LEGEND)
    for verdict in verdicts:
        for line in rows(verdict):
            found.add_row(*line, style=STYLES[verdict.result] if line[1] == "plugin" else "dim")
    return found


def page(verdicts: Sequence[Verdict], facts: Sequence[str]) -> str:
    """In Markdown."""
    lines = ["# Parity with upstream", "", *(f"- {fact}" for fact in facts), "", LEGEND, ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(line) + " |" for verdict in verdicts for line in rows(verdict)]
    lines += ["", *notes(verdicts), "", "![Gradient gaps](gaps.svg)", ""]
    return "\n".join(lines)


def notes(verdicts: Sequence[Verdict]) -> list[str]:
    """What a reader needs to know of single cases, each said once."""
    found = []
    if any(verdict.measured_by for verdict in verdicts):
        found.append(
            "`*` upstream cannot do it, or is no measure: allowed is twice its gap in the dense model of the same "
            "parallelism and precision."
        )
    said: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.note:
            said.setdefault((verdict.result, verdict.note), []).append(verdict.case.name)
    for (result, note), cases in said.items():
        named = ", ".join(cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")
        found.append(f"{result} {named}: {note}")
    return found


def write_json(verdicts: Sequence[Verdict], facts: Sequence[str], file: Path) -> None:
    """Everything that was found."""
    found = [{**asdict(v), "case": v.case.name, "plugin": _named(v.plugin), "limit": _named(v.limit)} for v in verdicts]
    for entry, verdict in zip(found, verdicts, strict=True):
        entry["upstream"] = {name: _named(gap) for name, gap in verdict.upstream.items()}
    file.write_text(json.dumps({"facts": list(facts), "cases": found}, indent=1) + "\n")


def plot(verdicts: Sequence[Verdict], file: Path) -> None:
    """Every case's gradient gap over upstream's, which it may have twice of."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2), layout="constrained")
    shown = [v for v in verdicts if v.plugin is not None and v.limit is not None and v.plugin.grad > 0]
    for model in dict.fromkeys(v.case.model for v in shown):
        of_model = [v for v in shown if v.case.model == model]
        x, y = [v.limit.grad / MARGIN for v in of_model], [v.plugin.grad for v in of_model]
        axes.scatter(x, y, s=22, alpha=0.7, label=model)
    ends = [v.limit.grad / MARGIN for v in shown] or [1e-7, 1e-6]
    line = [min(ends) / 2, max(ends) * 2]
    axes.plot(line, [MARGIN * x for x in line], color="tab:red", lw=1, label="allowed")
    axes.plot(line, line, color="gray", lw=1, ls="--", label="as upstream")
    axes.set(xscale="log", yscale="log", xlabel="upstream: gradient gap to one rank", ylabel="plugin: the same")
    axes.legend(frameon=False)
    figure.savefig(file)
    plt.close(figure)


def _numbers(gap: Gap | None) -> tuple[str, str, str]:
    return ("", "", "") if gap is None else (f"{gap.loss:.1e}", f"{gap.norm:.1e}", f"{gap.grad:.1e}")


def _named(gap: Gap | None) -> dict[str, object] | None:
    return None if gap is None else gap._asdict()
