"""``cp-plugin bench --decode``: refusals, providers, and the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

from cp_plugin.attention.setups import Setup, settled, settled_or_reason
from cp_plugin.cli.bench import decode, request
from cp_plugin.cli.bench.contestants import Entry
from cp_plugin.cli.bench.decode import RING, DecodeResult, Measured
from cp_plugin.cli.bench.measure import Processors
from cp_plugin.cli.bench.report import conditions, print_notes
from cp_plugin.cli.flags import in_our_flags
from cp_plugin.cli.tables import problem_as_json, settings
from cp_plugin.cli.terminal import print_table
from cp_plugin.common.text import in_bytes, in_seconds
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.testing import ranks

COLUMNS = (
    "provider", "settings", "worst error", "prefill", "of ring's", "a token", "its messages", "over them", "sent",
    "bytes",
)  # fmt: skip
EXPLAINED = (
    "one layer; times are medians of the slowest rank; a token: one decode step; its messages: the same messages with "
    "nothing computed, in the same rounds; sent: by the busiest rank per token; bytes: whether all ranks sent what the "
    "formula says"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All lengths and their common conditions."""

    results: Sequence[DecodeResult]
    device: str
    rounds: int
    others: float
    """Share of processor time that other programs used during the run."""

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)

    def print(self, console: Console) -> None:
        for result in self.results:
            rows = [(_cells(result, one), "red" if one.wrong else "") for one in result.measured]
            title = f"prefill and decode: {conditions(result.problem, self.device, self.rounds)}"
            print_table(console, title, COLUMNS, rows)
        print_notes(console, (EXPLAINED,), self.others)

    @property
    def verdict(self) -> str:
        pairs = [(result, one) for result in self.results for one in result.measured]
        timed = [(result, one) for result, one in pairs if one.decode]
        counted = sum(result.counted(one) for result, one in timed)
        parts = [f"{len(timed)} of {len(pairs)} timed, {counted} sent the bytes of the formula"]
        wrong = sum(one.wrong for _, one in pairs)
        return "; ".join(parts + [f"{wrong} WRONG, not timed"] * bool(wrong))

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "rounds": self.rounds,
            "tokens_of_a_call": decode.STEPS,
            "torch": torch.__version__,
            "others": self.others,
            "ok": self.ok,
            "lengths": [_as_json(result) for result in self.results],
        }


def chosen(texts: Sequence[str], problem: Problem) -> list[Setup]:
    """The settled providers, ``ring`` always among them.

    Raises:
        ValueError: for a provider that cannot decode, is named twice, or has options that do not fit.
    """
    entries = [Entry.parse(text) for text in texts or providers.names()]
    for entry in entries:
        if not entry.provided or entry.kind == "linear":
            why = "linear attention decodes without messages" if entry.provided else "a peer cannot decode here"
            raise ValueError(f"--provider {entry} with --decode: {why}: use one of {', '.join(providers.names())}")
    if len(set(map(str, entries))) < len(entries):
        raise ValueError(f"--provider: every provider once, not {', '.join(map(str, entries))}")
    if RING not in map(str, entries):
        entries.insert(0, Entry(name=RING))
    found = []
    for entry in entries:
        options = Options(**dict(entry.options))
        try:
            made = (settled if entry.options else settled_or_reason)(providers.get(entry.name), problem, options)
        except ValueError as error:
            raise ValueError(f"--provider {entry}: {error}") from None
        found.append(made)
    return found


def bench_decode(asked: request.Request) -> Report:
    """Measure; ValueError for a request that cannot run."""
    problems, device, size = asked.problems(), asked.device, asked.problem.size
    here = ranks.start(device, size)
    hosts = ranks.hosts(size)
    setups = [chosen(asked.providers, replace(problem, hosts=hosts)) for problem in problems]
    processors = Processors()
    results = decode.bench(setups, device, asked.rounds, asked.timeout, here)
    others = processors.others() if here is None and device == "cpu" else 0.0
    return Report(results=results, device=request.in_words(device), rounds=asked.rounds, others=others)


def _cells(result: DecodeResult, one: Measured) -> tuple[str, ...]:
    setup = one.setup
    assert setup is not None
    if setup.reason is not None:
        return (one.name, f"cannot: {in_our_flags(setup.reason)}", *[""] * (len(COLUMNS) - 2))
    worst = max(one.errors, key=lambda name: one.errors[name])
    error = f"{worst} {one.errors[worst]:.1e}"
    if one.wrong:
        return (one.name, settings(setup), f"WRONG: {error}", *[""] * (len(COLUMNS) - 3))
    ratio, over = result.over_ring(one), result.over_floor(one)
    return (
        one.name,
        settings(setup),
        error,
        in_seconds(statistics.median(one.prefill)),
        "" if ratio is None else f"{ratio:.2f}x",
        in_seconds(statistics.median(one.decode)),
        in_seconds(statistics.median(result.floor)) if result.floor else "",
        "" if over is None else f"{over:.2f}x",
        in_bytes(max(one.sent)),
        "formula" if result.counted(one) else f"DIFFER: {list(one.sent)}, formula {list(result.formula)}",
    )


def _as_json(result: DecodeResult) -> dict[str, Any]:
    providers_found = []
    for one in result.measured:
        setup = one.setup
        assert setup is not None
        entry: dict[str, Any] = {"name": one.name, "layout": setup.layout, "chosen": setup.options.chosen}
        entry |= {"cannot": None if setup.reason is None else in_our_flags(setup.reason)}
        if setup.reason is None:
            entry |= {"errors": one.errors, "allowed": one.allowed, "correct": not one.wrong}
            entry |= {"prefill": list(one.prefill), "decode": list(one.decode), "sent": list(one.sent)}
            entry |= {"over_ring": result.over_ring(one), "over_floor": result.over_floor(one)}
        providers_found.append(entry)
    return {
        "problem": problem_as_json(result.problem),
        "floor": list(result.floor),
        "formula": list(result.formula),
        "providers": providers_found,
    }
