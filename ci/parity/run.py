"""Plugin beside upstream: both against training without context parallelism, from the same weights and batches.

    python ci/parity/run.py                      the short form, for every change
    python ci/parity/run.py --all                every case
    python ci/parity/run.py --case 'moe/*/ring/*'

Writes parity.md, parity.json and the logs of all trainings to --out. Exit status: 0 all as it must be, 1 not,
2 a mistake on the command line.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
from pathlib import Path
from typing import Annotated

import goldens as stored
import launching
import sides
import tables
import torch
import typer
from judging import Judge, Verdict
from matrix import Case, Device, Matrix, load
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(width=None if sys.stdout.isatty() else 160)
app = typer.Typer(add_completion=False)


@app.command()
def main(
    short: Annotated[bool, typer.Option("--short", help="A case of every kind; the default.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every case.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="Cases by name; * stands for anything.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the names of all cases, and train nothing.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Show what changes in the goldens, ask, write.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --update: do not ask.")] = False,
    goldens: Annotated[Path, typer.Option(help="The file of goldens.")] = stored.FILE,
    launcher: Annotated[str, typer.Option(help="forked, torchrun or srun; default: forked without CUDA.")] = "",
    script: Annotated[str | None, typer.Option(help="A training script, as Megatron-LM's pretrain_gpt.py.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("out/parity"),
) -> None:
    """Train CP 1, upstream's context parallelism and the plugin's, and compare."""
    with _mistakes_are_said():
        if short + everything + bool(case) > 1:
            raise ValueError("--short, --all and --case exclude each other: give one of them")
        if launcher and launcher not in launching.LAUNCHERS:
            raise ValueError(f"--launcher {launcher}: choose one of {', '.join(launching.LAUNCHERS)}")
        device: Device = "cuda" if torch.cuda.is_available() else "cpu"
        launcher = launcher or ("torchrun" if device == "cuda" else "forked")
        if device == "cuda" and launcher == "forked":
            raise ValueError("--launcher forked: only on the CPU, for which CUDA must be hidden; use torchrun or srun")
        matrix = load()
        if listed:
            print("\n".join(one.name for one in matrix.cases(device)))
            return
        cases = _chosen(matrix, device, everything, case)
        if update and not yes and not sys.stdin.isatty():
            raise ValueError("--update asks before it writes, and there is no terminal: add --yes")
    if launcher == "forked":
        sides.preload()
    from importlib.metadata import version

    machine = f"{device}, megatron-core {version('megatron-core')}"
    book = stored.Goldens(goldens, machine)
    start = time.monotonic()
    seeds = None if everything or case else matrix.short.seeds
    verdicts = _judged(cases, matrix, device, book, launcher, out, script, seeds)
    facts = (
        f"{machine}, torch {torch.__version__}, {platform.machine()}, {launcher} ranks",
        f"{len(cases)} cases, {time.monotonic() - start:.0f} s",
        _upstream(device),
    )
    _report(verdicts, facts, device, out)
    if update:
        _update(book, yes)
    raise typer.Exit(any(verdict.result == "FAIL" for verdict in verdicts))


@contextlib.contextmanager
def _mistakes_are_said():
    try:
        yield
    except ValueError as error:
        print(f"parity: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _chosen(matrix: Matrix, device: Device, everything: bool, patterns: list[str] | None) -> list[Case]:
    if everything:
        return matrix.cases(device)
    if patterns:
        return matrix.chosen(device, tuple(patterns))
    names = matrix.short.cases
    if device == "cuda":
        names = tuple(dict.fromkeys(name.replace("float32", "bfloat16") for name in names))
    return matrix.chosen(device, names)


def _judged(
    cases: list[Case],
    matrix: Matrix,
    device: Device,
    book: stored.Goldens,
    launcher: str,
    out: Path,
    script: str | None,
    seeds: int | None,
) -> list[Verdict]:
    columns = (TextColumn("{task.description:60}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(cases))
        runner = launching.Runner(launcher, out, script, lambda what: progress.update(bar, description=what))
        judge = Judge(matrix, device, runner, book, seeds)
        verdicts = []
        for case in cases:
            verdicts.append(judge.judge(case))
            tables.write_json(verdicts, ("stopped before the last case",), out / "parity.json")
            progress.advance(bar)
    return verdicts


def _upstream(device: Device) -> str:
    if device == "cuda":
        return (
            "upstream: stock Megatron with Transformer Engine (p2p is the measure; all_gather, a2a, a2a+p2p beside it)"
        )
    return (
        "upstream: stock Megatron with PyTorch's own context-parallel ring as core attention; Transformer Engine's "
        "p2p, all_gather, a2a and a2a+p2p need CUDA and were not run"
    )


def _report(verdicts: list[Verdict], facts: tuple[str, ...], device: Device, out: Path) -> None:
    console.print(tables.table(verdicts, device))
    for line in (*tables.notes(verdicts), *facts):
        console.print(line, markup=False, highlight=False)
    (out / "parity.md").write_text(tables.page(verdicts, facts))
    tables.write_json(verdicts, facts, out / "parity.json")
    counts = {result: sum(v.result == result for v in verdicts) for result in tables.STYLES}
    good = not counts["FAIL"]
    summary = f"{counts['PASS']} as upstream or better than twice its gap, {counts['REFUSED']} refused as documented"
    console.print(f"report: {out / 'parity.md'}")
    console.print(
        f"PASS: {summary}" if good else f"FAIL: {counts['FAIL']} of {len(verdicts)}; {summary}",
        style="bold green" if good else "bold red",
    )


def _update(book: stored.Goldens, yes: bool) -> None:
    changed = book.difference()
    for key, before, now, relative in changed:
        console.print(f"{key}\n  stored {before}\n  now    {now}\n  relative {relative:.1e}", markup=False)
    if not changed:
        console.print("goldens: nothing changes")
    elif yes or typer.confirm(f"write {len(changed)} goldens?"):
        book.update()
        console.print(f"goldens: {len(changed)} written")


if __name__ == "__main__":
    app()
