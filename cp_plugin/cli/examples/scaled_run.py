"""Run the two trainings of ``scaled``, and show the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cp_plugin.cli.examples.command import CONTEXT, words
from cp_plugin.cli.examples.config import Value
from cp_plugin.cli.examples.scaled import Scaled
from cp_plugin.cli.examples.training import (
    Iteration,
    corpus,
    difference,
    disagreements,
    largest,
    print_losses,
    train,
    verdict,
)
from cp_plugin.cli.terminal import print_lines, print_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Both runs."""

    of: Scaled
    one: Sequence[Iteration]
    many: Sequence[Iteration]
    problems: Sequence[str]


def run(of: Scaled, steps: int, out: Path, *, quiet: bool = False) -> Trained:
    """Train with context parallelism first, where a mistake in the flags shows, then without."""
    experiment = of.command.experiment
    folder = out / experiment.name / experiment.variant.replace("/", "-")
    folder.mkdir(parents=True, exist_ok=True)
    data = [
        *corpus(out / "stdlib", quiet=quiet),
        "--data-cache-path",
        str(folder / "cache"),
        "--eval-interval",
        "1000000",
    ]
    divided = of.many.value("cp-provider") or of.many.value("cp-linear-attention")
    traffic = ["--cp-log-traffic"] if divided else []
    log = folder / f"ranks{of.many.devices}.log"
    many = train([*of.many.flags, *data, *traffic], of.many.devices, steps, log, quiet=quiet)
    one = train([*of.one.flags, *data], of.one.devices, steps, folder / "cp1.log", quiet=quiet)
    problems = disagreements(one, many, steps, of.tolerance)
    if one and many and not difference(one[0], many[0]) <= of.first:
        problems.append(f"the first losses differ by {difference(one[0], many[0]):.1e}, allowed {of.first:.0e}")
    if traffic and not all(i.bytes > 0 for i in many):
        problems.append("no context-parallel traffic was reported")
    return Trained(of=of, one=one, many=many, problems=problems)


def as_json(found: Trained) -> dict[str, Any]:
    """Everything."""
    of = found.of
    return {
        "example": of.command.experiment.name,
        "variant": of.command.experiment.variant,
        "ranks": of.many.devices,
        "context": of.many.size(CONTEXT),
        "flags": of.many.flags,
        "changed": {flag: {"full": before, "here": now, "why": why} for flag, (before, now, why) in of.changed.items()},
        "losses": [i.loss for i in found.many],
        "losses_cp1": [i.loss for i in found.one],
        "bytes": [i.bytes for i in found.many],
        "tolerance": of.tolerance,
        "first_step": of.first,
        "problems": list(found.problems),
        "ok": not found.problems,
    }


def print_changes(console: Console, of: Scaled) -> None:
    """How the run differs from the full command, and what it keeps."""
    experiment = of.command.experiment
    rows = [((f"--{flag}", _shown(full), _shown(here), why), "") for flag, (full, here, why) in of.changed.items()]
    title = f"{experiment.config.title}, variant {experiment.variant}, on {of.many.devices} CPU ranks: what is changed"
    print_table(console, title, ("flag", "full", "here", "why"), rows)
    kept = [
        " ".join(words(flag, value))
        for flag, value in of.many.values.items()
        if flag not in of.changed and ("parallel" in flag or flag.startswith("cp-"))
    ]
    print_lines(console, f"kept: {' '.join(kept)}\n", whole=True)


def print_run(console: Console, found: Trained) -> None:
    """The losses side by side, and the verdict."""
    of, experiment = found.of, found.of.command.experiment
    print_losses(console, found.one, found.many, ("CP 1", f"CP {of.many.size(CONTEXT)}"))
    passed = (
        f"{experiment.name} ({experiment.variant}) on {of.many.devices} ranks equals CP 1: {len(found.one)} "
        f"losses within {largest(found.one, found.many):.1e} (allowed {of.tolerance:.0e}), the first within "
        f"{largest(found.one[:1], found.many[:1]):.1e} ({of.first:.0e})"
    )
    verdict(console, found.problems, passed)


def _shown(value: Value) -> str:
    if value is True:
        return "on"
    return " ".join(words("", value)[1:])
