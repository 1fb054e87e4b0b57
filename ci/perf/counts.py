"""Stored counts that must not change unnoticed: reading them, what differs, as a table, and writing it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cp_plugin.tools.output import print_table, print_verdict

Counts = dict[str, int] | str
"""Numbers by name; or, instead of numbers, why there are none."""
CONSOLE = Console(width=None if sys.stdout.isatty() else 160)


def read(file: Path) -> dict[str, Any]:
    """The JSON of a file; nothing if there is no such file."""
    return json.loads(file.read_text()) if file.exists() else {}


def differences(stored: Mapping[str, Counts], now: Mapping[str, Counts]) -> list[tuple[str, str, str, str]]:
    """Rows of entry, counter, stored and current value for everything that differs."""
    rows = []
    for entry in dict.fromkeys([*stored, *now]):
        before, after = _as_dict(stored.get(entry)), _as_dict(now.get(entry))
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                rows.append((entry, name, _shown(before.get(name)), _shown(after.get(name))))
    return rows


def _as_dict(counts: Counts | None) -> Mapping[str, int | str]:
    if counts is None:
        return {}
    return {"refused": counts} if isinstance(counts, str) else counts


def _shown(value: int | str | None) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


def compare(
    stored: Mapping[str, Counts], now: Mapping[str, Counts], entries: str, write: Callable[[], None] | None
) -> None:
    """Print PASS, or what differs and FAIL with exit status 1.

    entries: what the keys are, such as "setup".
    write: write the current counts, and pass.
    """
    rows = differences(stored, now)
    if not rows:
        numbers = sum(len(_as_dict(counts)) for counts in now.values())
        print_verdict(True, f"{numbers:,} counts of {len(now)} {entries}s as stored", CONSOLE)
        return
    print_table(CONSOLE, "What differs", (entries, "what", "stored", "now"), [(row, "") for row in rows])
    if write is None:
        print_verdict(False, f"{len(rows)} differ; if they are meant to, --update", CONSOLE)
        raise typer.Exit(1)
    write()
    print(f"{len(rows)} changes written")


def lines(counts: Mapping[str, Counts]) -> str:
    """Write JSON with a line per entry."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(entry)}: {json.dumps(numbers)}" for entry, numbers in counts.items()) + "\n}"
    )
