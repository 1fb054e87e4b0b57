"""Stored counts that must not change unnoticed: what differs, as a table, and writing it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

import typer
from rich.console import Console
from rich.table import Table

Counts = dict[str, int] | str
"""Numbers by name; or, instead of numbers, why there are none."""


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
    stored: Mapping[str, Counts],
    now: Mapping[str, Counts],
    entries: str,
    write: Callable[[], None] | None,
) -> None:
    """Print PASS, or what differs and FAIL with exit status 1.

    entries: what the keys are, such as "setup".
    write: write the current counts, and pass.
    """
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = differences(stored, now)
    if rows:
        table = Table(entries, "what", "stored", "now", title="What differs")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if write is not None and rows:
        write()
        console.print(f"{len(rows)} changes written")
        return
    if rows:
        console.print(f"FAIL: {len(rows)} differ; if they are meant to, --update", style="bold red")
        raise typer.Exit(1)
    numbers = sum(1 if isinstance(counts, str) else len(counts) for counts in now.values())
    console.print(f"PASS: {numbers:,} counts of {len(now)} {entries}s as stored", style="bold green")


def lines(counts: Mapping[str, Counts]) -> str:
    """JSON with a line per entry."""
    return (
        "{\n" + ",\n".join(f"{json.dumps(entry)}: {json.dumps(numbers)}" for entry, numbers in counts.items()) + "\n}"
    )
