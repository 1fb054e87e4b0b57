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
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from faults import FAULTS, TIMEOUT, Fault
from rich.console import Console
from rich.table import Table

LIMIT = 1.5
"""Times the timeout, from the fault to the end of the last rank."""
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    short: Annotated[bool, typer.Option("--short", help="the short form, and 6 kills during saving")] = False,
    all_: Annotated[bool, typer.Option("--all", help="every fault")] = False,
    only: Annotated[list[str] | None, typer.Option(help="a fault's name; repeat it")] = None,
    saves: Annotated[int | None, typer.Option(min=0, help="kills at a random moment of saving")] = None,
    seed: Annotated[int, typer.Option(help="of the random moments")] = 0,
    out: Annotated[Path | None, typer.Option("--json", help="write every outcome to this file")] = None,
) -> None:
    chosen = choose(short=short, everything=all_, only=only or [])
    if saves is None:
        saves = 6 if short else 0
    if not chosen and not saves:
        print("error: give --short, --all, --only NAME or --saves N", file=sys.stderr)
        raise typer.Exit(2)
    import trial

    trial.preload()
    rows = []
    for fault in chosen:
        rows.append(judge(fault))
        print(f"{fault.name}: {rows[-1]['verdict']} ({rows[-1]['seconds']:.1f} s)", flush=True)
        if out:
            out.write_text(json.dumps(rows, indent=1))
    rows += killed_while_saving(saves, seed) if saves else []
    show(rows)
    if out:
        out.write_text(json.dumps(rows, indent=1))
    failed = [row for row in rows if row["verdict"] not in ("ok", "left out")]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} as they must be; timeout {TIMEOUT:g} s, limit {LIMIT:g} times that"
    )
    raise typer.Exit(bool(failed))


def choose(*, short: bool, everything: bool, only: list[str]) -> list[Fault]:
    """The faults that are asked for; leaves with status 2 for a name that there is not."""
    names = [fault.name for fault in FAULTS]
    for name in only:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3) or names
            print(f"error: --only {name}: choose one of {', '.join(near)}", file=sys.stderr)
            raise typer.Exit(2)
    return [fault for fault in FAULTS if everything or (short and fault.short) or fault.name in only]


def judge(fault: Fault) -> dict[str, object]:
    """Do it, and hold what happened against what must."""
    import special

    row: dict[str, object] = {"name": fault.name, "what": fault.what, "expect": fault.expect}
    if fault.needs == "root" and os.geteuid() != 0:
        return row | {"verdict": "left out", "message": "needs root", "seconds": 0.0}
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    started = time.monotonic()
    try:
        ended = special.run(fault, folder)
    except special.Wrong as wrong:
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


def killed_while_saving(trials: int, seed: int) -> list[dict[str, object]]:
    """Every third in the torch_dist format, the others in torch: the next start goes on as if undisturbed."""
    import special

    moments = random.Random(seed)
    rows: list[dict[str, object]] = []
    for i in range(trials):
        style = "torch_dist" if i % 3 == 2 else "torch"
        delay, rank = moments.uniform(0, 0.1 if style == "torch" else 0.6), moments.randrange(2)
        folder = Path(tempfile.mkdtemp(prefix="faults-"))
        row: dict[str, object] = {
            "name": f"save-{i + 1}",
            "what": f"{style}: SIGKILL of rank {rank} {delay * 1000:.0f} ms into saving",
            "expect": "resumes",
        }
        try:
            ended = special.kill_saving(folder, delay=delay, style=style, rank=rank)
            rows.append(row | {"verdict": "ok", "seconds": ended.seconds, "message": "", "status": ended.status})
        except special.Wrong as wrong:
            rows.append(row | {"verdict": "WRONG", "seconds": 0.0, "message": str(wrong)})
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{row['name']}, {row['what']}: {rows[-1]['verdict']}", flush=True)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    table = Table("fault", "what", "must", "is", "s", "message", show_lines=True)
    for row in rows:
        cells = (row["name"], row["what"], row["expect"], row["verdict"], f"{row['seconds']:.1f}", row["message"])
        table.add_row(*(str(cell).replace("[", "\\[") for cell in cells))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    app()
