"""Regimes in which the plugin wins, measured on virtual clusters against the planner's prediction. Needs root.

    python ci/cluster/regimes.py
    python ci/cluster/regimes.py --only few-heads --rounds 3

Every regime is calibrated as in ``predict.py``, and its runs are timed in turn: ours first, then stock Megatron's, each
as the method of this package with the same messages, with gradients of keys and values in their own dtype. *As people
run it*: under full recomputation stock Megatron repeats the forward and its messages, which then counts twice. Measured
regimes replace those in the record, ``regimes.json``, from which the table of ``docs/wins.md`` is made. Exits with 1 if
a result is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import packs
import typer
from bench import Measured, measure
from network import Network, command, require_cluster
from predict import calibrated
from report import commit, update_record
from rich.console import Console
from scenarios import Scenario, parse_rate

from cp_plugin import Options
from cp_plugin.attention.setups import Setup, settled
from cp_plugin.cli import flags
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.cli.bench.measure import Processors
from cp_plugin.methods import registry as providers
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.packs import each_by_itself
from cp_plugin.planner.trace.timeline import simulate

RECORD = Path(__file__).with_name("regimes.json")
_TIMEOUT = 900.0
_SMALL = {"apart": True, "seq": 4096, "heads": 4, "head_dim": 32}
_MANY = {"nodes": 64, "rate": "20mbit", **_SMALL}
_FLAT = {"nodes": 16, "rate": "20mbit", **_SMALL}
_CARDS = {"nodes": 4, "ranks_per_node": 4, "nic": "node", "rate": "50mbit", **_SMALL}
_CHAT = _FLAT | {"seq": 65536, "heads": 2, "kv_heads": 1, "documents": "chat"}
_WINDOW = _FLAT | {"seq": 32768, "heads": 2, "window": 1023}
_STOCK = ("ring:layout=zigzag", "all_gather:layout=zigzag")
_USP = "usp:head_parallel=4"
_IN_BFLOAT16 = tuple(f"{run},gradient_dtype=model" for run in (*_STOCK, _USP))
REGIMES = {
    "few-heads": (
        "64 nodes, 4 query heads and 1 KV head",
        Scenario(**_MANY, kv_heads=1, runs=("attention2d:grid=16x4", *_STOCK)),
        1,
    ),
    "many-ranks": (
        "64 nodes, 4 heads",
        Scenario(**_MANY, runs=("attention2d:grid=4x4,head_parallel=4", *_STOCK, _USP)),
        1,
    ),
    "card-per-node": (
        "4 nodes of 4 ranks that share a card, 4 heads",
        Scenario(**_CARDS, runs=("attention2d:grid=2x2,head_parallel=4", "burst:backward=q", *_STOCK, _USP)),
        2,
    ),
    "fp8-payloads": (
        "16 nodes, 4 heads, FP8 payloads of ours and bfloat16 of stock",
        Scenario(**_FLAT, dtype="bfloat16", runs=("attention2d:grid=2x2,head_parallel=4,fp8=comm", *_IN_BFLOAT16)),
        1,
    ),
    "documents": (
        "a pack of chat documents",
        Scenario(**_CHAT, runs=("needed@placed", "ring@each", "all_gather@each")),
        1,
    ),
    "window": (
        "a window of 1,024 in 32,768 tokens",
        Scenario(**_WINDOW, runs=("needed:layout=contiguous", "all_gather:layout=zigzag", "usp:head_parallel=2")),
        1,
    ),
}
"""Name -> description, runs, and how many of them only we have. The others are both stock's and ours, except for
documents cut one by one."""
WAYS = {"same recomputation": False, "as people run it": True}
"""Name of a comparison -> whether stock's forward counts twice."""
app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    only: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(REGIMES)}; repeat it")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="timed calls of each contestant")] = 3,
    record: Annotated[Path, typer.Option(help="the file in which measured regimes replace earlier ones")] = RECORD,
) -> None:
    with command():
        for name in only or ():
            flags.check_name("--only", name, tuple(REGIMES))
        require_cluster()
        ok = True
        for name in only or REGIMES:
            found = update_record(record, name, _regime(name, rounds))[name]
            ok &= all(run["correct"] for run in found["runs"])
            Console().print(*lines(found), sep="\n", highlight=False, soft_wrap=True)
    raise typer.Exit(not ok)


def _regime(name: str, rounds: int) -> dict[str, Any]:
    what, scenario, ours = REGIMES[name]
    processors, entries = Processors(), scenario.entries()
    with Network(scenario.topology(), parse_rate(scenario.rate)) as network:
        profile = calibrated(network, [scenario])
        measured = measure(network, scenario, rounds=rounds, timeout=_TIMEOUT)
    runs = [
        _run(entry, found, scenario, profile)
        | {"ours": number < ours or "@each" not in str(entry), "stock": number >= ours}
        for number, (entry, found) in enumerate(zip(entries, measured, strict=True))
    ]
    found = {"what": what, "rate": scenario.rate, "others": processors.others(), "commit": commit(), "runs": runs}
    return found | {text: _ratios(runs, repeated) for text, repeated in WAYS.items()}


def _run(entry: Entry, found: Measured, scenario: Scenario, profile: Cluster) -> dict[str, Any]:
    setup = _setup(entry, scenario)
    timeline = simulate(setup, setup.problem, cluster=profile, ranks="all")
    return {
        "entry": str(entry),
        "correct": found.correct or dict(entry.options).get("fp8") is not None,
        "measured": [median(found.forwards), median(found.seconds)],
        "predicted": [timeline.forward_s, timeline.seconds],
    }


def _setup(entry: Entry, scenario: Scenario) -> Setup:
    """The setup to simulate, with the documents and placement of packs."""
    problem, options = scenario.problem(), dict(entry.options)
    if isinstance(entry, packs.OnPack):
        problem = replace(problem, bounds=scenario.bounds())
        if entry.place == "each":
            problem = replace(problem, placed=each_by_itself(scenario.bounds()))
        else:
            options["layout"] = {"placed": "documents"}.get(entry.place, entry.place)
    return settled(providers.get(entry.name), problem, Options(**options))


def _ratios(runs: Sequence[dict[str, Any]], repeated: bool) -> dict[str, Any]:
    """Stock's fastest run over ours, predicted and measured, and their names; ``repeated``: stock's forward counts
    twice."""
    found: dict[str, Any] = {}
    for key in ("predicted", "measured"):
        ours = min((run[key][1], run["entry"]) for run in runs if run["ours"])
        stock = min((run[key][1] + repeated * run[key][0], run["entry"]) for run in runs if run["stock"])
        found |= {key: stock[0] / ours[0], "ours": ours[1], "stock": stock[1]}
    return found


def lines(found: dict[str, Any]) -> Sequence[str]:
    """The terminal output."""
    rows = [
        f"  {run['entry']:40} measured {run['measured'][1]:.2f} s, predicted {run['predicted'][1]:.2f} s"
        f"{'' if run['correct'] else ' WRONG'}"
        for run in found["runs"]
    ]
    for text in WAYS:
        rows.append(f"  {text}: {found[text]['measured']:.2f}x, predicted {found[text]['predicted']:.2f}x")
    return [found["what"], *rows]


if __name__ == "__main__":
    app()
