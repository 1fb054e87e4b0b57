"""Plant faults in trainings, and look how they end.

    bash ci/faults/run.sh --short                the form of continuous integration
    bash ci/faults/run.sh --all                  every fault
    bash ci/faults/run.sh --only kill-forward    one; repeat it
    bash ci/faults/run.sh --saves 200            kill -9 at a random moment of saving, 200 times

Ends with 1 when a fault did not end as it must. Needs root for the faults that mount or cut something: without, they
are left out by name.
"""

from __future__ import annotations

import difflib
import functools
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated, Any

import page
import typer
from faults import FAULTS, LIMIT, TIMEOUT, Fault
from rich.console import Console
from rich.table import Table

SHORT_SAVES = 6
app = typer.Typer(add_completion=False)
Row = dict[str, object]


@app.command(help=__doc__)
def main(
    short: Annotated[bool, typer.Option("--short", help="the short form, and 6 kills during saving")] = False,
    all_: Annotated[bool, typer.Option("--all", help="every fault")] = False,
    only: Annotated[list[str] | None, typer.Option(help="a fault's name; repeat it")] = None,
    saves: Annotated[int | None, typer.Option(min=0, help="kills at a random moment of saving")] = None,
    seed: Annotated[int, typer.Option(help="of the random moments")] = 0,
    lanes: Annotated[int, typer.Option(min=1, help="trials side by side")] = 3,
    out: Annotated[Path | None, typer.Option("--json", help="write every outcome to this file")] = None,
    renew: Annotated[
        bool, typer.Option("--page", help="renew the tables in docs/faults.md: with --all, --saves or both")
    ] = False,
) -> None:
    chosen = choose(short=short, everything=all_, only=only or [])
    if saves is None:
        saves = SHORT_SAVES if short else 0
    if not chosen and not saves:
        print("error: give --short, --all, --only NAME or --saves N", file=sys.stderr)
        raise typer.Exit(2)
    if renew and not all_ and (chosen or not saves):
        print("error: --page: a table has every fault; give --all, or --saves alone", file=sys.stderr)
        raise typer.Exit(2)
    rows = everything(chosen, saves, seed, lanes, out)
    show(rows[: len(chosen)] + [row for row in rows[len(chosen) :] if row["verdict"] != "ok"])
    if renew:
        page.renew(rows[: len(chosen)], rows[len(chosen) :])
    failed = [row for row in rows if row["verdict"] not in ("ok", "left out")]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} as they must be; timeout {TIMEOUT:g} s, limit {LIMIT:g} times that"
    )
    raise typer.Exit(bool(failed))


def everything(chosen: list[Fault], saves: int, seed: int, lanes: int, out: Path | None) -> list[Row]:
    """One row for each fault, in their order, and then one for each kill during saving."""
    import saving
    import special
    import trial

    trial.preload()
    if any(fault.expect == "resumes" for fault in chosen):
        special.undisturbed()  # once, before the lanes
    losses = saving.undisturbed(saving.STEPS) if saves else {}
    waiting = [fault for fault in chosen if fault.slow]
    work = [(judge, fault) for fault in (*waiting, *(f for f in chosen if not f.slow))]
    work += [(functools.partial(saving.run, losses=losses), chain) for chain in saving.chains(saves, seed)]
    found: list[list[Row]] = [[] for _ in work]
    for place, rows in side_by_side(work, lanes):
        found[place] = rows if isinstance(rows, list) else [rows]
        for row in found[place]:
            print(f"{row['name']}: {row['verdict']} ({row['seconds']:.1f} s)", flush=True)
        if out:
            out.write_text(json.dumps([row for rows in found for row in rows], indent=1))
    order = {fault.name: i for i, fault in enumerate(chosen)}
    return sorted((row for rows in found for row in rows), key=lambda row: order.get(row["name"], len(order)))


def side_by_side(work: Sequence[tuple[Callable[..., Any], Any]], lanes: int) -> Iterator[tuple[int, Any]]:
    """(place in ``work``, function(argument)) for each pair of function and argument, as they come.

    In forked processes, which import nothing anew. A trial names what it leaves running, and kills it: each lane sees
    only what it started itself.
    """
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(lanes, mp_context=forking, initializer=_be_a_lane, initargs=(os.getpid(),)) as pool:
        places = {pool.submit(function, argument): i for i, (function, argument) in enumerate(work)}
        for done in as_completed(places):
            yield places[done], done.result()


def _be_a_lane(parent: int) -> None:
    import trial

    from cp_plugin.testing.launch_rank import die_with_parent

    die_with_parent(parent)
    trial.adopt_orphans()


def choose(*, short: bool, everything: bool, only: list[str]) -> list[Fault]:
    """The faults that are asked for; leaves with status 2 for a name that there is not."""
    names = [fault.name for fault in FAULTS]
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3) or names
            print(f"error: --only {name}: choose one of {', '.join(near)}", file=sys.stderr)
            raise typer.Exit(2)
    return [fault for fault in FAULTS if everything or (short and fault.short) or fault.name in only]


def judge(fault: Fault) -> Row:
    """Do it, and hold what happened against what must."""
    import special

    row: Row = {"name": fault.name, "what": fault.what, "expect": fault.expect}
    if fault.root and os.geteuid() != 0:
        return row | {"verdict": "left out", "message": "needs root", "seconds": 0.0}
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    started = time.monotonic()
    try:
        ended = special.run(fault, folder)
    except (special.Wrong, OSError) as wrong:
        return row | {"verdict": "WRONG", "message": str(wrong), "seconds": time.monotonic() - started}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
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
    """The lines that say what happened: the plugin's report, or the line that the pattern is found in."""
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


if __name__ == "__main__":
    app()
