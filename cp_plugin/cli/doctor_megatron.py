"""``cp-plugin doctor --megatron DIR``: what the plugin would replace in a Megatron, and whether it is as needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from cp_plugin.cli.terminal import print_lines, print_table, print_verdict

_STYLES = {"broken": "red", "absent": "dim", "checked": ""}


def examine(folder: str, words: Sequence[str]) -> dict[str, Any]:
    """What ``megatron.patches.doctor`` finds, in a process of its own.

    Raises:
        ValueError: for a folder without Megatron, an unsupported version, or wrong flags; and if the process fails.
    """
    command = [sys.executable, "-m", "cp_plugin.megatron.patches.doctor", folder, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        found: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError:
        why = (done.stderr.strip() or "it printed nothing").rpartition("\n")[2]
        raise ValueError(f"--megatron {folder}: Megatron could not be examined: {why}") from None
    if "error" in found:
        raise ValueError(found["error"])
    return found


def stops(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The symbols for which a run would not start."""
    return [one for one in found["symbols"] if one["state"] == "broken" and one["needed"] and not one["late"]]


def show(console: Console, found: dict[str, Any], folder: str) -> None:
    """Print the table, what its words mean, every broken contract, and whether a run would start."""
    rows = [
        ((one["state"], one["contract"], one["symbol"], one["for"]), _STYLES[one["state"]]) for one in found["symbols"]
    ]
    title = f"megatron-core {found['version']} in {folder}: what a run would replace"
    print_table(console, title, ("state", "contract", "symbol", "what for"), rows)
    counts = Counter(one["state"] for one in found["symbols"])
    for state, meaning in (
        ("checked", "what the plugin relies on is there"),
        ("absent", "not in this version, and not needed"),
    ):
        if counts[state]:
            print_lines(console, f"{state}: {counts[state]}, {meaning}")
    broken = [one for one in found["symbols"] if one["state"] == "broken"]
    for one in broken:
        print_lines(console, "", *one["broken"].splitlines())
    stopping = stops(found)
    others = [one["for"] for one in broken if one not in stopping]
    verdict = f"{len(stopping)} broken: a run would not start" if stopping else "a run would start"
    print_verdict(not stopping, verdict + "".join(f"; broken: {what}" for what in others), console)
