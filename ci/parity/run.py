"""Plugin and upstream, each against training without context parallelism from the same weights and batches.

    python ci/parity/run.py                      the short form, for every change
    python ci/parity/run.py --all                every case
    python ci/parity/run.py --case 'moe/*/ring/*'

Prints a table, and writes parity.json and the logs of all trainings to --out. Exit status: 0 everything as required,
1 not, 2 a mistake on the command line.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import launching
import sides
import torch
import typer
from judging import Judge, Verdict
from matrix import Case, Device, Matrix, load
from rich.console import Console
from rich.progress import track
from training import Gap

from cp_plugin.tools.output import print_lines, print_table, print_verdict

COLUMNS = ("case", "", "loss", "gradient norm", "gradients", "result")
STYLES = {"PASS": "green", "REFUSED": "cyan", "FAIL": "bold red"}
LEGEND = (
    "Differences to a training without context parallelism; in brackets, the share of the limit. *: upstream cannot do "
    "it, or is no measure: the limit is from another model; +: and from what bfloat16 costs this one (README.md)."
)
UPSTREAM: dict[Device, str] = {
    "cuda": "stock Megatron with Transformer Engine; p2p is the measure",
    "cpu": "stock Megatron with PyTorch's context-parallel ring as core attention; Transformer Engine needs CUDA",
}
console = Console(width=None if sys.stdout.isatty() else 160)
app = typer.Typer(add_completion=False)


@app.command()
def main(
    short: Annotated[bool, typer.Option("--short", help="A case of every kind; the default.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every case.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="Cases by name; * matches anything.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Print the names of all cases without training.")] = False,
    launcher: Annotated[str, typer.Option(help="forked, torchrun or srun; default: forked without CUDA.")] = "",
    script: Annotated[str | None, typer.Option(help="A training script, as Megatron-LM's pretrain_gpt.py.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("out/parity"),
) -> None:
    """Train CP 1, upstream's context parallelism and the plugin's, and compare."""
    try:
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
    except ValueError as error:
        print(f"parity: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if launcher == "forked":
        sides.preload()
    start = time.monotonic()
    seeds = None if everything or case else matrix.short["seeds"]
    judge = Judge(matrix, device, launching.Runner(launcher, out, script), seeds)
    verdicts: list[Verdict] = []
    for one in track(cases, "judging", console=Console(stderr=True), transient=True):
        verdicts.append(judge.judge(one))
        write_json(verdicts, ("stopped before the last case",), out / "parity.json")
    facts = (
        f"{device}, megatron-core {version('megatron-core')}, torch {torch.__version__}, {platform.machine()}",
        f"{len(cases)} cases, {launcher} ranks, {time.monotonic() - start:.0f} s",
        f"upstream: {UPSTREAM[device]}",
    )
    _report(verdicts, facts, device, out)
    raise typer.Exit(any(verdict.result == "FAIL" for verdict in verdicts))


def _chosen(matrix: Matrix, device: Device, everything: bool, patterns: list[str] | None) -> list[Case]:
    if everything:
        return matrix.cases(device)
    if patterns:
        return matrix.chosen(device, tuple(patterns))
    names = tuple(matrix.short["cases"])
    if device == "cuda":
        names = tuple(dict.fromkeys(name.replace("float32", "bfloat16") for name in names))
    return matrix.chosen(device, names)


def _report(verdicts: Sequence[Verdict], facts: Sequence[str], device: Device, out: Path) -> None:
    rows = []
    for verdict in verdicts:
        name = verdict.case.name
        for which, gap in verdict.upstream.items():
            rows.append(((name, which, *_numbers(gap)), "dim"))
            name = ""
        mark = "plugin" + (" *" if verdict.measured_by else "") + ("+" if verdict.cost is not None else "")
        cells = (name, mark, *_numbers(verdict.plugin, verdict.limit), verdict.result)
        rows.append((cells, STYLES[verdict.result]))
    print_table(console, f"Plugin beside upstream, each against one rank, on {device}", COLUMNS, rows)
    print_lines(console, LEGEND, *_notes(verdicts), *facts, f"report: {out / 'parity.json'}")
    write_json(verdicts, facts, out / "parity.json")
    counts = {result: sum(v.result == result for v in verdicts) for result in STYLES}
    summary = f"{counts['PASS']} within twice upstream's gap, {counts['REFUSED']} refused as documented"
    failed = f"{counts['FAIL']} of {len(verdicts)}; " if counts["FAIL"] else ""
    print_verdict(not failed, failed + summary, console)


def _numbers(gap: Gap | None, limit: Gap | None = None) -> tuple[str, ...]:
    """Show the differences, with their share of the limit if there is one."""
    if gap is None:
        return "", "", ""
    pairs = zip(gap[:3], (0, 0, 0) if limit is None else limit[:3], strict=True)
    return tuple(f"{x:.1e} ({x / most:.0%})" if most else f"{x:.1e}" for x, most in pairs)


def _notes(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the explanations of single cases, each once."""
    said: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if verdict.note:
            said.setdefault((verdict.result, verdict.note), []).append(verdict.case.name)
    return [
        f"{result} {', '.join(cases[:3])}{f' and {len(cases) - 3} more' if len(cases) > 3 else ''}: {note}"
        for (result, note), cases in said.items()
    ]


def write_json(verdicts: Sequence[Verdict], facts: Sequence[str], file: Path) -> None:
    cases = [_as_json(asdict(verdict) | {"case": verdict.case.name}) for verdict in verdicts]
    file.write_text(json.dumps({"facts": list(facts), "cases": cases}, indent=1) + "\n")


def _as_json(value: Any) -> Any:
    """Turn each gap in a value into a dictionary."""
    if isinstance(value, Gap):
        return value._asdict()
    if isinstance(value, dict):
        return {name: _as_json(part) for name, part in value.items()}
    return [_as_json(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    app()
