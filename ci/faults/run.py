"""Plant faults in training runs and check how they end.

    bash ci/faults/run.sh --short                a subset
    bash ci/faults/run.sh --all                  every fault
    bash ci/faults/run.sh --only kill-forward    one; repeat it

Exits with 1 if a fault did not end as required. Faults that mount a file system or cut a link need root and are listed
as left out without it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import special
import trial
import typer
from faults import FAULTS, LIMIT, TIMEOUT, Fault
from rich.console import Console
from rich.table import Table

from cp_plugin.engine.common.names import one_of
from cp_plugin.testing.launch_rank import die_with_parent
from cp_plugin.tools.flags import errors_in_one_line

RECORD = Path(__file__).parents[2] / "docs" / "faults.json"
Row = dict[str, Any]


def main(
    short: Annotated[bool, typer.Option("--short", help="a subset")] = False,
    all_: Annotated[bool, typer.Option("--all", help="every fault")] = False,
    only: Annotated[list[str] | None, typer.Option(help="a fault's name; repeat it")] = None,
    lanes: Annotated[int, typer.Option(min=1, help="trials in parallel")] = 3,
    kept: Annotated[bool, typer.Option("--record", help="rewrite docs/faults.json: with --all")] = False,
) -> None:
    """Plant faults in training runs and check how they end."""
    with errors_in_one_line():
        for name in only or ():
            one_of("--only", name, [fault.name for fault in FAULTS])
        chosen = [fault for fault in FAULTS if all_ or (short and fault.short) or fault.name in (only or ())]
        if not chosen or (kept and not all_):
            raise ValueError("give --short, --all or --only NAME; --record: with --all, since it has every fault")
    trial.preload()
    if any(fault.expect == "resumes" for fault in chosen):
        special.undisturbed()  # once, before the lanes fork
    rows = {fault.name: {} for fault in chosen}
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(lanes, mp_context=forking, initializer=become_lane, initargs=(os.getpid(),)) as pool:
        for row in pool.map(judge, sorted(chosen, key=lambda fault: not fault.waits_for_timeout)):
            rows[row["name"]] = row
            print(f"{row['name']}: {row['verdict']} ({row['seconds']:.1f} s)", flush=True)
    table = Table("fault", "what", "must", "is", "s", "message", show_lines=True)
    for row in rows.values():
        cells = (row["name"], row["what"], row["expect"], row["verdict"], f"{row['seconds']:.1f}", row["message"])
        table.add_row(*(cell.replace("[", "\\[") for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if kept:  # for docs/faults.md
        fields = ("name", "what", "expect", "verdict", "seconds")
        lines = (json.dumps({field: row[field] for field in fields}) for row in rows.values())
        RECORD.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    failed = [row for row in rows.values() if row["verdict"] not in ("ok", "left out")]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} ended as required; timeout {TIMEOUT:g} s, limit {LIMIT:g} times that"
    )
    raise typer.Exit(bool(failed))


def become_lane(parent: int) -> None:
    """A trial names and kills what it leaves running; each lane sees only its own processes."""
    die_with_parent(parent)
    trial.adopt_orphans()


def judge(fault: Fault) -> Row:
    """Run the fault and compare the outcome with what it must be."""
    row: Row = {"name": fault.name, "what": fault.what, "expect": fault.expect}
    if fault.root and os.geteuid() != 0:
        return row | {"verdict": "left out", "message": "needs root", "seconds": 0.0}
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
            ended = special.run(fault, Path(folder))
    except (special.Wrong, OSError) as wrong:
        return row | {"verdict": "WRONG", "message": str(wrong), "seconds": time.monotonic() - started}
    found = verdict(fault, ended)
    said = message(fault, ended.text) if found == "ok" else ended.text[-20000:]
    return row | {"verdict": found, "message": said, "seconds": ended.seconds}


def verdict(fault: Fault, ended) -> str:
    """``ok``, or what is wrong."""
    if ended.hung:
        return "HUNG"
    if ended.left:
        return f"LEFT RUNNING: {'; '.join(ended.left)}"
    if fault.expect == "survives" and ended.status:
        return f"ENDED with {ended.status}"
    if fault.expect == "ends" and ended.status == 0:
        return "NOT NOTICED: status 0"
    if fault.expect == "ends" and ended.seconds > LIMIT * TIMEOUT:
        return "TOO LATE"
    if fault.says and not re.search(fault.says, ended.text):
        return "NO SUCH MESSAGE"
    return "ok"


def message(fault: Fault, text: str) -> str:
    """The plugin's report, or what the pattern matches."""
    report = re.search(r"^cp_plugin: rank \d+ of .*(?:\n  .*)*", text, re.MULTILINE)
    if report:
        return report[0]
    found = re.search(fault.says, text) if fault.says else None
    return found[0][:400] if found else ""


if __name__ == "__main__":
    typer.run(main)
