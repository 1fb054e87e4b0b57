"""Plant faults in training runs and check how they end.

    bash ci/faults/run.sh --short                a subset
    bash ci/faults/run.sh --all                  every fault
    bash ci/faults/run.sh --only kill-forward    one; repeat it

Exits with 1 if a fault did not end as required. Faults that mount a file system or cut a link need root and are listed
as left out without it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import trial
import typer
from faults import FAULTS, LIMIT, TIMEOUT, Fault
from rank_faults import Plant
from rich.console import Console
from rich.table import Table
from trial import Ended

from cp_plugin.engine.common.names import one_of
from cp_plugin.testing.launch_rank import die_with_parent
from cp_plugin.tools.flags import errors_in_one_line

RECORD = Path(__file__).parents[2] / "docs" / "faults.json"
STEPS = 6
UNDISTURBED = Fault(name="", what="")
LINKS: dict[str, Callable[[Any], None]] = {
    "cut": lambda network: network.cut(2),
    "slow": lambda network: network.shape(10_000_000),
}
Row = dict[str, Any]


class Wrong(Exception):
    """An outcome that is not the expected one."""


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
        undisturbed()  # once, before the lanes fork
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
            ended = run(fault, Path(folder))
    except (Wrong, OSError) as wrong:
        return row | {"verdict": "WRONG", "message": str(wrong), "seconds": time.monotonic() - started}
    outcome = verdict(fault, ended)
    said = message(fault, ended.text) if outcome == "ok" else ended.text[-20000:]
    return row | {"verdict": outcome, "message": said, "seconds": ended.seconds}


def base(fault: Fault) -> str:
    return f"--mock-data --train-iters {STEPS} --context-parallel-size {fault.ranks} --cp-provider ring {fault.flags}"


@functools.lru_cache
def undisturbed() -> dict[int, str]:
    """Iteration -> loss of a two-rank run without a fault."""
    ended = trial.train(base(UNDISTURBED))
    if ended.status or len(ended.losses) != STEPS:
        raise Wrong(f"the undisturbed run ended with {ended.status}: {ended.text[-2000:]}")
    return ended.losses


def run(fault: Fault, folder: Path) -> Ended:
    """Run the training with the fault in an empty folder and, if it must be resumable, the next start.

    Raises:
        Wrong: if the next start does not continue with the losses of an undisturbed run.
    """
    if fault.link:
        return run_on_links(fault)
    flags = base(fault).format(folder=folder)
    if fault.format:
        flags += f" --ckpt-format {fault.format} --save {folder} --save-interval {fault.save_every}"
    plants = [replace(plant, once=plant.once.format(folder=folder)) for plant in fault.plants]
    with _room(folder, fault.room), socket.create_server(("127.0.0.1", 0)) as busy:
        if fault.torchrun:
            ended = trial.torchrun(flags, fault.torchrun.format(port=busy.getsockname()[1]), plants)
        else:
            ended = trial.train(flags, ranks=fault.ranks, plants=plants, flags_of_rank_1=fault.flags_of_rank_1)
        if fault.expect == "resumes" and fault.torchrun:
            _require_losses(ended, range(1, STEPS + 1))  # of both starts
        elif fault.expect == "resumes":
            again = trial.train(f"{base(UNDISTURBED)} --ckpt-format {fault.format} --load {folder}")
            _require_losses(again, range(min(again.losses, default=0), STEPS + 1))
            if min(again.losses) == 1:
                raise Wrong("the next start began from scratch")
    return ended


def _require_losses(ended: Ended, steps: range) -> None:
    """Raise Wrong unless the last start completed, and these steps have the losses of the undisturbed run."""
    if ended.status or STEPS not in ended.losses:
        lines = [line for line in ended.text.splitlines() if "Error" in line or "cp_plugin:" in line]
        said = lines[-1][:300] if lines else ended.text[-300:]
        raise Wrong(f"the next start ended with {ended.status}: {said}")
    wrong = {i: ended.losses.get(i) for i in steps if undisturbed()[i] != ended.losses.get(i)}
    if wrong:
        raise Wrong(f"the next start has different losses: {wrong}")


@contextlib.contextmanager
def _room(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount a file system of that size on the folder; 0: leave it as it is."""
    if not kilobytes:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def run_on_links(fault: Fault) -> Ended:
    """Train on the virtual nodes of ci/cluster; all traffic, including the store's, uses their links."""
    from network import Network, Topology

    def join() -> None:
        port = "29511"  # free: the network namespace is new
        os.environ["GLOO_SOCKET_IFNAME"] = network.enter(int(os.environ["RANK"]))
        os.environ.update(
            MASTER_ADDR=network.topology.address(0), MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False"
        )

    with Network(Topology(nodes=2, ranks_per_node=2, nic="node"), 1_000_000_000) as network:

        def meanwhile(mark: Path) -> None:
            deadline = time.monotonic() + 120
            while not mark.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            LINKS[fault.link](network)

        plants = [Plant(rank=3, at="forward", step=3, do="nothing")]
        flags = base(fault)
        if fault.expect == "ends":  # still training when the link goes down
            flags = flags.replace(f"--train-iters {STEPS}", "--train-iters 1000")
        return trial.train(flags, ranks=4, plants=plants, prepare=join, meanwhile=meanwhile)


def verdict(fault: Fault, ended: Ended) -> str:
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
    said = re.search(fault.says, text) if fault.says else None
    return said[0][:400] if said else ""


if __name__ == "__main__":
    typer.run(main)
