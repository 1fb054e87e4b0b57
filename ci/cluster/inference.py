"""Prefill and decode on a virtual cluster: real Gloo ranks on slow links, on one Linux machine. Needs root.

    python ci/cluster/inference.py
    python ci/cluster/inference.py --nodes 4 --seq 256 --rounds 1

16 nodes of one rank each. Prefill, which is bound by the links: ``attention2d`` must be at least 2.3 times as fast as
``ring``. Decode after a short context: at most 1.3 times its messages alone, sent in the same rounds without
computation. Every provider is first compared with one device. Exits with 1 if a provider is wrong, sends other bytes
than its formula, or misses its target; 2 on an unsuitable machine.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from bench import yield_to_network
from network import Network, Topology, command, require_cluster
from ranks import run_in
from rich.console import Console
from scenarios import parse_rate

from cp_plugin import Options, Problem
from cp_plugin.attention.setups import Setup, settled
from cp_plugin.cli.bench import decode
from cp_plugin.cli.bench.decode import DecodeResult
from cp_plugin.cli.bench.measure import Processors
from cp_plugin.cli.bench.report import print_notes
from cp_plugin.methods import registry as providers

RUNS = ("ring", "attention2d")
FASTER, OVER_FLOOR = 2.3, 1.3
"""Targets: least speed-up of prefill, largest ratio of decode to its messages."""
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of the two measurements."""

    heads: int
    head_dim: int
    seq: int


PREFILL = Part(heads=8, head_dim=32, seq=1024)
"""Twice the tokens double the messages and quadruple the computation, which shares few cores."""
DECODE = Part(heads=32, head_dim=128, seq=256)
"""Messages of 16.5 kB, as in a large layer: sixteen ranks share few cores, and the links are slow to match."""


@app.command(help=__doc__)
def main(
    nodes: Annotated[int, typer.Option(min=2, help="of one rank each")] = 16,
    rate: Annotated[str, typer.Option(help="of each link, each way")] = "5mbit",
    seq: Annotated[int, typer.Option(min=1, help="tokens of the prompt")] = PREFILL.seq,
    context: Annotated[int, typer.Option(min=1, help="tokens before the first that is decoded")] = DECODE.seq,
    rounds: Annotated[int, typer.Option(min=1, help="timed calls of each")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for each of the two")] = 1800,
) -> None:
    with command():
        parts = {
            "prefill": setups(nodes, replace(PREFILL, seq=seq), "--seq"),
            "decode": setups(nodes, replace(DECODE, seq=context), "--context"),
        }
        speed = parse_rate(rate)
        if speed is None:
            raise ValueError(f"--rate {rate}: give a rate, such as 5mbit")
        require_cluster()
        with Network(Topology(nodes=nodes, ranks_per_node=1, nic="rank"), speed) as network:
            processors = Processors()
            found = {name: _measured(network, of_part, rounds, timeout) for name, of_part in parts.items()}
        others = processors.others()
    ok = show(found["prefill"], found["decode"], others)
    raise typer.Exit(not ok)


def setups(nodes: int, part: Part, flag: str) -> list[Setup]:
    """The contestants; ValueError for an indivisible length."""
    if part.seq % (2 * nodes):
        raise ValueError(f"{flag} {part.seq} must be a multiple of {2 * nodes}, twice the number of ranks")
    problem = Problem(
        size=nodes, heads=part.heads, kv_heads=part.heads, head_dim=part.head_dim, seq_length=part.seq,
        dtype=torch.float32, hosts=tuple(f"node{n}" for n in range(nodes)),
    )  # fmt: skip
    options = {"attention2d": Options(head_parallel=1)}
    return [settled(providers.get(name), problem, options.get(name, Options())) for name in RUNS]


def show(prefill: DecodeResult, decoded: DecodeResult, others: float) -> bool:
    """Print figures and verdicts; whether all targets are met."""
    console = Console(soft_wrap=True)
    ring, grid = (statistics.median(m.prefill) if m.prefill else float("nan") for m in prefill.measured)
    text = f"prefill: attention2d {grid:.3f} s, ring {ring:.3f} s: {ring / grid:.2f}x (wanted: at least {FASTER}x)"
    verdicts = [(text, ring / grid >= FASTER)]
    floor = statistics.median(decoded.floor) if decoded.floor else float("nan")
    for name, one in zip(RUNS, decoded.measured, strict=True):
        over = decoded.over_floor(one) or float("nan")
        token = statistics.median(one.decode) if one.decode else float("nan")
        times = f"{1e3 * token:.1f} ms a token, {1e3 * floor:.1f} ms its messages: {over:.2f}x"
        verdicts.append((f"decode, prompt by {name}: {times} (at most {OVER_FLOOR}x)", over <= OVER_FLOOR))
    verdicts.append(("results are those of one device, and bytes those of the formula", prefill.ok and decoded.ok))
    for text, met in verdicts:
        style = "green" if met else "bold red"
        console.print(f"{'PASS' if met else 'FAIL'} {text}", style=style, markup=False, highlight=False)
    print_notes(console, (), others)
    return all(met for _, met in verdicts)


def _measured(network: Network, of_part: list[Setup], rounds: int, timeout: float) -> DecodeResult:
    def rank() -> DecodeResult:
        dist.barrier()
        yield_to_network()
        return decode.run(of_part, torch.device("cpu"), rounds)

    return run_in(network, rank, timeout=timeout)[0]


if __name__ == "__main__":
    app()
