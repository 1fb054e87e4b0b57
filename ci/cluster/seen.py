"""The gain of sending needed keys only and of placing documents by length. Needs root.

    python ci/cluster/seen.py
    python ci/cluster/seen.py --only chat16 --rounds 3

chat16      a pack of chat documents on a virtual cluster of 16 nodes, slow links; ``chat16-fast``: fast ones
window16    a window of 1,024 in 65,536 tokens; ``window16-fast``
balance     kernel time of each of 16 ranks alone, for packs of chat and of long documents
bytes       bytes sent at full size, 262,144 tokens, with documents padded as by Transformer Engine

Measured parts replace those in the record, ``seen.json``, from which the tables of ``docs/results.md`` are made. Exits
with 1 if a part misses its target, 2 on an unsuitable machine.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from alone import kernel_seconds, sent
from network import command
from packs import OnPack, full_size, on_cluster
from report import commit, update_record
from rich.console import Console
from rich.table import Table
from run import measured
from scenarios import SCENARIOS

from cp_plugin import Problem
from cp_plugin.cli import flags
from cp_plugin.cli.bench.measure import Processors
from cp_plugin.planner.packs import padded

RECORD = Path(__file__).with_name("seen.json")
TABLES = ("chat16", "chat16-fast", "window16", "window16-fast")
PARTS = (*TABLES, "balance", "bytes")
SHORTER = 1.5
"""Target: kernel time of the busiest rank with zigzag over the pack, over that with a placed pack."""
app = typer.Typer(add_completion=False)


RANKS, TOKENS, PACKS = 16, 131072, 2
"""Balance: packs per kind, and their tokens, with one head."""
KINDS = ("chat", "long")
FULL = ("chat", "code", "long")
RUNS = ("needed@placed", "needed@zigzag", "ring@zigzag")
"""Balance: the first against the better of the others."""


@app.command(help=__doc__)
def main(
    only: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(PARTS)}; repeat it; default: all")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed calls of each contestant")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for each table")] = 3600,
    record: Annotated[Path, typer.Option(help="the file in which the measured parts replace earlier ones")] = RECORD,
) -> None:
    with command():
        for name in only or ():
            flags.check_name("--only", name, PARTS)
        ok, content = True, {}
        for name in only or PARTS:
            content = update_record(record, name, _part(name, rounds, timeout))
            ok &= content[name].get("ok", True)
    raise typer.Exit(not ok)


def _part(name: str, rounds: int, timeout: float) -> dict[str, Any]:
    if name in TABLES:
        found = measured(SCENARIOS[name], rounds=rounds, timeout=timeout)
        found.print(Console())
        return {"ok": found.ok, **found.as_json()}
    return balance(rounds) if name == "balance" else {kind: full_size_bytes(kind) for kind in FULL}


def full_size_bytes(kind: str) -> dict[str, int]:
    """Bytes sent by the busiest of 16 ranks, forward and backward: 32 query and 8 key/value heads of 128, bfloat16,
    gradients summed in float32."""
    lengths, found = full_size(kind, RANKS), {}
    for run in ("needed@placed", "needed@zigzag", "ring@zigzag", "ring@each"):
        bounds = tuple(accumulate(padded(lengths, RANKS) if run == "ring@each" else lengths, initial=0))
        problem = Problem(size=RANKS, heads=32, kv_heads=8, seq_length=bounds[-1], documents=True)
        found[run] = max(sent(OnPack.parse(run), problem, bounds))
    return found


def balance(rounds: int) -> dict[str, Any]:
    """Kernel seconds of each rank alone."""
    entries, processors, found = [OnPack.parse(run) for run in RUNS], Processors(), []
    problem = Problem(size=RANKS, head_dim=32, seq_length=TOKENS, dtype=torch.float32, documents=True)
    for kind, seed in itertools.product(KINDS, range(PACKS)):
        bounds = on_cluster(kind, RANKS, TOKENS, seed)
        taken = kernel_seconds(entries, problem, bounds, rounds)
        seconds = {run: [round(s, 4) for s in of_ranks] for run, of_ranks in taken.items()}
        found.append({"kind": kind, "seed": seed, "documents": len(bounds) - 1, "seconds": seconds})
    table = Table("pack", "contestant", "busiest rank, s", "mean, s", "busiest over that of the placed pack")
    for pack, (run, seconds) in ((p, one) for p in found for one in p["seconds"].items()):
        cells = (f"{max(seconds):.3f}", f"{statistics.mean(seconds):.3f}", f"{_over_placed(pack, run):.2f}x")
        table.add_row(f"{pack['kind']} {pack['seed']}", run, *cells)
    Console().print(table)
    ratios = {kind: shorter(found, kind) for kind in KINDS}
    for kind, ratio in ratios.items():
        verdict = "PASS" if ratio >= SHORTER else "FAIL"
        Console().print(f"{verdict} {kind}: {ratio:.2f}x as short (wanted: {SHORTER}x)", highlight=False)
    ok = all(ratio >= SHORTER for ratio in ratios.values())
    return {"ok": ok, "rounds": rounds, "others": processors.others(), "commit": commit(), "packs": found}


def shorter(packs: Sequence[dict[str, Any]], kind: str) -> float:
    """Kernel time of the busiest rank, zigzag over placed: mean over the packs of a kind."""
    return statistics.mean(min(_over_placed(pack, run) for run in RUNS[1:]) for pack in packs if pack["kind"] == kind)


def _over_placed(pack: dict[str, Any], run: str) -> float:
    return max(pack["seconds"][run]) / max(pack["seconds"][RUNS[0]])


if __name__ == "__main__":
    app()
