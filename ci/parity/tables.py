"""Verdicts for people: a table in the terminal, a page in Markdown; and for programs, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from comparing import MARGIN, ROUNDING, Gap
from judging import Verdict
from rich.table import Table

COLUMNS = ("case", "", "loss", "gradient norm", "gradients", "golden", "result")
STYLES = {"PASS": "green", "REFUSED": "cyan", "FAIL": "bold red"}
LEGEND = (
    "Differences to a training without context parallelism: of loss and gradient norm the largest of all steps, over "
    "the power of two below the value; of the gradients in step 1 that of the worst parameter, norm over norm. In "
    f"brackets, of what is allowed: {MARGIN:g} times upstream's own in the same run, of loss and norm the largest of "
    f"several seeds, and at least {ROUNDING:.1e}, one rounding of a float32."
)


def rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Lines of a table: upstream's, each of them, and the plugin's below."""
    name = verdict.case.name
    for which, gap in verdict.upstream.items():
        yield name, which, *_numbers(gap), "", ""
        name = ""
    mark = "plugin" + (" *" if verdict.measured_by else "") + ("+" if verdict.cost is not None else "")
    yield name, mark, *_numbers(verdict.plugin, verdict.limit), verdict.golden[:5], verdict.result


def table(verdicts: Sequence[Verdict], device: str) -> Table:
    """For the terminal."""
    found = Table(*COLUMNS, title=f"Plugin beside upstream, each against one rank, on {device}", caption=LEGEND)
    for verdict in verdicts:
        for line in rows(verdict):
            found.add_row(*line, style=STYLES[verdict.result] if line[-1] else "dim")
    return found


def page(verdicts: Sequence[Verdict], facts: Sequence[str]) -> str:
    """In Markdown."""
    lines = ["# Parity with upstream", "", *(f"- {fact}" for fact in facts), "", LEGEND, ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(line) + " |" for verdict in verdicts for line in rows(verdict)]
    lines += ["", *notes(verdicts), ""]
    return "\n".join(lines)


def notes(verdicts: Sequence[Verdict]) -> list[str]:
    """What a reader needs to know of single cases, each said once."""
    found = []
    if any(verdict.measured_by for verdict in verdicts):
        found.append(
            "`*` upstream cannot do it, or is no measure: allowed is twice its gap in another model (dense, or "
            "hybrid_model) of the same parallelism and precision."
        )
    if any(verdict.cost is not None for verdict in verdicts):
        found.append(
            "`*+` of loss and gradient norm the larger of that and twice what bfloat16 costs this very model on one "
            "rank: the difference of its training in bfloat16 to that in float32, with Megatron's seed."
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
    found = [{**asdict(verdict), "case": verdict.case.name} for verdict in verdicts]
    for entry, verdict in zip(found, verdicts, strict=True):
        entry |= {name: _named(getattr(verdict, name)) for name in ("plugin", "cost", "limit")}
        entry["upstream"] = {name: _named(gap) for name, gap in verdict.upstream.items()}
        entry["seeds"] = [_named(gap) for gap in verdict.seeds]
    file.write_text(json.dumps({"facts": list(facts), "cases": found}, indent=1) + "\n")


def _numbers(gap: Gap | None, limit: Gap | None = None) -> tuple[str, ...]:
    """With the share of the limit, where there is one."""
    if gap is None:
        return "", "", ""
    if limit is None:
        return tuple(f"{x:.1e}" for x in gap[:3])
    return tuple(
        f"{x:.1e} ({x / most:.0%})" if most else f"{x:.1e}" for x, most in zip(gap[:3], limit[:3], strict=True)
    )


def _named(gap: Gap | None) -> dict[str, object] | None:
    return None if gap is None else gap._asdict()
