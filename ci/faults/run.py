"""Plant faults in trainings and check how they end.

    bash ci/faults/run.sh --short                a subset
    bash ci/faults/run.sh --all                  every fault
    bash ci/faults/run.sh --only kill-forward    one; repeat it

Exits with 1 if a fault did not end as required. Faults that mount a file system or cut a link need root and are listed
as left out without it.
"""

from __future__ import annotations

import difflib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import typer
from faults import FAULTS, LIMIT, TIMEOUT, Fault
from rich.console import Console
from rich.table import Table

RECORD = Path(__file__).parents[2] / "docs" / "faults.json"
app = typer.Typer(add_completion=False)
Row = dict[str, Any]


@app.command(help=__doc__)
def main(
    short: Annotated[bool, typer.Option("--short", help="a subset")] = False,
    all_: Annotated[bool, typer.Option("--all", help="every fault")] = False,
    only: Annotated[list[str] | None, typer.Option(help="a fault's name; repeat it")] = None,
    lanes: Annotated[int, typer.Option(min=1, help="trials in parallel")] = 3,
    out: Annotated[Path | None, typer.Option("--json", help="write every outcome to this file")] = None,
    kept: Annotated[bool, typer.Option("--record", help="rewrite docs/faults.json: with --all")] = False,
) -> None:
    chosen = choose(short=short, everything=all_, only=only or [])
    if not chosen:
        raise _usage("give --short, --all or --only NAME")
    if kept and not all_:
        raise _usage("--record: it has every fault; give --all")
    rows = run_all(chosen, lanes, out)
    show(rows)
    if kept:
        record(rows)
    failed = [row for row in rows if row["verdict"] not in ("ok", "left out")]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} ended as required; timeout {TIMEOUT:g} s, limit {LIMIT:g} times that"
    )
    raise typer.Exit(bool(failed))


def _usage(message: str) -> typer.Exit:
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(2)


def choose(*, short: bool, everything: bool, only: list[str]) -> list[Fault]:
    """The requested faults; exits with 2 for an unknown name."""
    names = [fault.name for fault in FAULTS]
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3) or names
            raise _usage(f"--only {name}: choose one of {', '.join(near)}")
    return [fault for fault in FAULTS if everything or (short and fault.short) or fault.name in only]


def run_all(chosen: list[Fault], lanes: int, out: Path | None) -> list[Row]:
    """A row per fault, in their order."""
    import special
    import trial

    trial.preload()
    if any(fault.expect == "resumes" for fault in chosen):
        special.undisturbed()  # once, before the lanes fork
    work = [(judge, fault) for fault in sorted(chosen, key=lambda fault: not fault.waits_for_timeout)]
    found: list[Row] = []
    for _, row in in_lanes(work, lanes):
        found.append(row)
        print(f"{row['name']}: {row['verdict']} ({row['seconds']:.1f} s)", flush=True)
        if out:
            out.write_text(json.dumps(found, indent=1))
    order = {fault.name: i for i, fault in enumerate(chosen)}
    return sorted(found, key=lambda row: order[row["name"]])


def in_lanes(work: Sequence[tuple[Callable[..., Any], Any]], lanes: int) -> Iterator[tuple[int, Any]]:
    """Yield (index in ``work``, function(argument)) as results arrive from forked processes.

    A trial names and kills what it leaves running; each lane sees only its own processes.
    """
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(lanes, mp_context=forking, initializer=_become_lane, initargs=(os.getpid(),)) as pool:
        places = {pool.submit(function, argument): i for i, (function, argument) in enumerate(work)}
        for done in as_completed(places):
            yield places[done], done.result()


def _become_lane(parent: int) -> None:
    import trial

    from cp_plugin.testing.launch_rank import die_with_parent

    die_with_parent(parent)
    trial.adopt_orphans()


def judge(fault: Fault) -> Row:
    """Run the fault and compare the outcome with what it must be."""
    import special

    row: Row = {"name": fault.name, "what": fault.what, "expect": fault.expect}
    if fault.root and os.geteuid() != 0:
        return row | {"verdict": "left out", "message": "needs root", "seconds": 0.0}
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
            ended = special.run(fault, Path(folder))
    except (special.Wrong, OSError) as wrong:
        return row | {"verdict": "WRONG", "message": str(wrong), "seconds": time.monotonic() - started}
    return row | {
        "verdict": verdict(fault, ended),
        "message": message(fault, ended.text),
        "seconds": ended.seconds,
        "status": ended.status,
        "took": time.monotonic() - started,
        "text": ended.text[-20000:],
    }


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
    """The plugin's report, or the line that the pattern matches."""
    report = re.search(r"^cp_plugin: rank \d+ of .*(?:\n  .*)*", text, re.MULTILINE)
    if report:
        return report[0]
    found = re.search(fault.says, text) if fault.says else None
    if not found:
        return ""
    start, end = text.rfind("\n", 0, found.start()) + 1, text.find("\n", found.end())
    return text[start : end if end >= 0 else None][:400]


def show(rows: list[Row]) -> None:
    table = Table("fault", "what", "must", "is", "s", "message", show_lines=True)
    for row in rows:
        cells = (row["name"], row["what"], row["expect"], row["verdict"], f"{row['seconds']:.1f}", row["message"])
        table.add_row(*(str(cell).replace("[", "\\[") for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def record(faults: list[Row], path: Path = RECORD) -> None:
    """Write the results that docs/faults.md shows."""
    rows = (json.dumps({key: row[key] for key in ("name", "what", "expect", "verdict", "seconds")}) for row in faults)
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    app()
