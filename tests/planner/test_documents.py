"""Packed documents in the planner: bytes and work match real ranks, and the search picks suitable methods."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from round_cluster import round_cluster
from typer.testing import CliRunner

from cp_plugin.engine.attention import calls
from cp_plugin.engine.attention.api import ContextParallel
from cp_plugin.engine.attention.calls import Setup, settled
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.protocol import Formula
from cp_plugin.engine.placement.documents import place
from cp_plugin.planner.candidates import candidates
from cp_plugin.planner.machine.hardware import Cluster
from cp_plugin.planner.packs import balance, divide_each, pairs, work
from cp_plugin.planner.price import least, place_on, price
from cp_plugin.planner.query import Query
from cp_plugin.planner.search import Plan, answer
from cp_plugin.planner.trace.program import program
from cp_plugin.planner.trace.timeline import simulate
from cp_plugin.planner.training.model import Model
from cp_plugin.planner.training.parallel import Parallel, problem
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.oracle import make_case
from cp_plugin.testing.traffic import read_ledger
from cp_plugin.tools import flags as given
from cp_plugin.tools.app import app
from cp_plugin.tools.bench.cases import LENGTHS
from cp_plugin.tools.draw.calls import record
from cp_plugin.tools.show_plan import print_plan

DOCUMENTS = "documents"
LENGTHS_OF_PACK = (41, 30, 21, 17, 9, 7, 2, 1)
BOUNDS = tuple(accumulate(LENGTHS_OF_PACK, initial=0))
PACK = Problem(size=4, heads=8, kv_heads=4, head_dim=16, seq_length=128, dtype=torch.float64, bounds=BOUNDS)
CHOSEN = {
    "needed": {},
    "needed behind a head axis": {"head_parallel": 2},
    "ring": {},
    "attention2d": {"grid": (2, 2)},
    "all_gather": {},
}


def setup(name: str, problem: Problem = PACK, layout: str | None = DOCUMENTS) -> Setup:
    return settled(providers.get(name.split()[0]), problem, Options(layout=layout, **CHOSEN[name]))


def test_ledger_is_trace_and_formula_on_placed_tokens() -> None:
    """On every rank, to the byte; and the output is attention's."""
    windowed = replace(PACK, window=(9, 0))
    setups = [*map(setup, CHOSEN), setup("needed", windowed), setup("needed", layout="contiguous")]

    def rank() -> list[tuple[Formula, float]]:
        results = []
        for one in setups:
            cp = ContextParallel(one, group=dist.group.WORLD)
            x, want = make_case(one.problem)[:2]
            shards = calls.Inputs(*(None if y is None else cp.shard(y).requires_grad_() for y in x))
            got = calls.call_through_autograd(cp, shards, one.problem)
            error = max(float((a - cp.shard(b)).abs().max()) for a, b in zip(got, want, strict=False))
            results.append((dict(read_ledger(cp.mesh)), error))
        return results

    ledgers = run_ranks(rank, PACK.size, init_process_group=True, timeout=120)
    for number, one in enumerate(setups):
        for index in range(PACK.size):
            ledger, error = ledgers[index][number]
            assert ledger == dict(program(one, index).sent)
            assert ledger == dict(one.provider.traffic(one.problem, one.options, index))
            assert error < 1e-10, (one.provider.name, one.layout)


SLOW = round_cluster(flops_per_s=1e14, intra=(1e-6, 1e9), inter=(1e-5, 1e8))
FAST = round_cluster(flops_per_s=1e14, intra=(1e-6, 1e13), inter=(1e-6, 1e13))
TINY = Model(name="tiny", layers=2, hidden=1024, heads=8, kv_heads=4, ffn_hidden=2048, vocab=1024)


@pytest.mark.parametrize("window", [None, (9, 0)])
def test_keys_and_balance_are_those_of_the_placement(window: tuple[int, int] | None) -> None:
    its = replace(PACK, window=window)
    one, placement = setup("needed", its), place(LENGTHS_OF_PACK, 4, left=window and window[0])
    sent = [one.provider.traffic(one.problem, one.options, index) for index in range(4)]
    of_key = PACK.kv_heads * 2 * PACK.head_dim * 8
    assert [f["forward", "cp"] for f in sent] == (placement.traffic().sum(0) * of_key).tolist()
    home = [f["backward", "cp"] - f["forward", "cp"] for f in sent]
    assert home == (placement.traffic().sum(1) * of_key).tolist()
    assert work(one).tolist() == placement.work().tolist() and balance(one) == placement.balance
    assert sum(work(one)) == pairs(one.problem)
    kernels = [program(one, index).pairs() // PACK.heads for index in range(4)]
    assert kernels == placement.work().tolist(), "what kernels are asked for"


def test_stock_pads_and_divides_each_document() -> None:
    theirs = divide_each(PACK)
    assert theirs.bounds == tuple(accumulate((48, 32, 24, 24, 16, 8, 8, 8), initial=0))
    one = candidates(PACK)["stock p2p"][0].setup
    assert one.problem == theirs and len(set(work(one).tolist())) == 1
    shape = Parallel(devices=4, context=4, seq_length=128, documents=LENGTHS_OF_PACK)
    its = place_on(problem(TINY, shape), SLOW, 1)
    prices = {n: price(candidates(its)[n][0], TINY, shape, SLOW) for n in ("stock p2p", "ring")}
    padded, ours = prices["stock p2p"], prices["ring"]
    assert padded.sent == pytest.approx(ours.sent * 168 / 128), "both send gradients in the model's dtype"
    assert padded.iteration.dense == pytest.approx(ours.iteration.dense * 168 / 128)
    assert padded.tokens_per_s * padded.iteration.seconds == pytest.approx(128 / 4), "padding is nobody's token"


@pytest.mark.parametrize("placed", [False, True], ids=["regular", "placed"])
@pytest.mark.parametrize("name", ["needed", "ring", "all_gather", "attention2d"])
def test_the_busiest_ranks_stand_for_all(name: str, placed: bool) -> None:
    """Those that compute most and send most, of 8 ranks, against a simulation of all."""
    shape = Parallel(devices=8, context=8, seq_length=2**16, documents=LENGTHS["chat"].pack(2**16))
    some = candidates(place_on(problem(TINY, shape), SLOW, 1))[name]
    one = next(c for c in some if (c.setup.layout == DOCUMENTS) == placed)
    few, every = (simulate(one.setup, cluster=SLOW, ranks=ranks) for ranks in ("busiest", "all"))
    assert few.seconds == pytest.approx(every.seconds, rel=0.15)
    assert sum(least(one, SLOW, 1)) <= every.seconds * (1 + 1e-9)
    sent = [max(sum(p.sent.values()) for p in t.programs.values()) for t in (few, every)]
    assert len(few.programs) <= 2 and sent[0] == sent[1]
    if name != "attention2d":  # moves queries, so a rank's work is not that of its own queries
        pairs_of = [max(p.pairs() for p in t.programs.values()) for t in (few, every)]
        assert pairs_of[0] == pairs_of[1]


def best_of(lengths: tuple[int, ...], cluster: Cluster) -> Plan:
    shape = Parallel(devices=4, context=4, seq_length=sum(lengths), documents=lengths)
    return answer(Query(model=TINY, shapes=[shape], cluster=cluster, limit=1e15), hopeless=1.2)


def test_documents_on_slow_links_are_placed() -> None:
    plan = best_of(LENGTHS["chat"].pack(2**16), SLOW)
    assert plan.best.candidate.flags == "--cp-provider needed --cp-layout documents"
    names = [lost.name for lost in plan.lost] + [p.candidate.name for p in plan.methods[plan.tied :]]
    assert {"stock p2p", "stock all_gather"} <= set(names), "stock methods take longer"
    console = Console(width=100, force_terminal=True, color_system=None, file=io.StringIO())
    print_plan(console, plan)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 100 or "flags:" in max(text.splitlines(), key=len)
    assert "…" not in text and f"{len(LENGTHS['chat'].pack(2**16))} documents in each sequence" in text
    assert "stock Megatron pads each to a multiple of 8" in " ".join(text.split())


def test_one_document_on_fast_links_ties_with_upstream() -> None:
    plan = best_of((2**16,), FAST)
    assert plan.best.candidate.setup.layout != DOCUMENTS
    upstream = min(p.iteration.seconds - p.repeats for p in plan.methods if p.candidate.upstream)
    assert plan.best.iteration.seconds == pytest.approx(upstream, rel=0.06)


def test_lengths_from_a_file_a_list_or_a_distribution(tmp_path: Path) -> None:
    """In order, repeated until the sequence is full, the last one cut."""
    (tmp_path / "lengths.txt").write_text("600\n200\n224\n")
    assert given.bounds(str(tmp_path / "lengths.txt"), 2048) == (0, 600, 800, 1024, 1624, 1824, 2048)
    assert given.bounds("600,200,224", 700) == (0, 600, 700)
    assert len(given.bounds(",".join(["600"] * 1000), 600_000)) == 1001, "longer than the name of a file may be"
    assert given.bounds("chat", 4096) == tuple(accumulate(LENGTHS["chat"].pack(4096), initial=0))


def test_bad_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file: did you mean chat\? Give a file"):
        given.bounds("chatt", 1024)
    with pytest.raises(ValueError, match=r"file\. Give a file, lengths such as 600,200,224, or one of chat, code, lo"):
        given.bounds("nowhere", 1024)
    with pytest.raises(
        ValueError, match="--documents 600,0: '0' is not a length; write the tokens of each document, 1 or more"
    ):
        given.bounds("600,0", 1024)
    for content, said in (("12\nabc\n", "'abc' is not a length"), ("\n", "it is empty")):
        (path := tmp_path / "lengths.txt").write_text(content)
        with pytest.raises(ValueError, match=f"{said}; write the tokens of each document"):
            given.bounds(str(path), 1024)


def test_traffic_on_both_layouts() -> None:
    words = "traffic --provider needed --ranks 4 --seq-length 1024 --window 16 --documents 600,200,224"
    result = CliRunner().invoke(app, words.split())
    rows = [line.split()[:2] for line in result.output.splitlines() if line.startswith("needed ")]
    assert result.exit_code == 0 and rows == [["needed", "zigzag"], ["needed", "documents"]]
    assert "3 documents" in result.output and "window 16" in result.output


def test_picture_shows_the_keys_of_the_plan(tmp_path: Path) -> None:
    """Against a query-by-query calculation, and the traffic of the placement."""
    lengths = (11, 7, 5, 5, 3, 1)
    ends = tuple(accumulate(lengths, initial=0))
    for layout in ("zigzag", DOCUMENTS):
        recorded = record("needed", 4, seq_length=32, bounds=ends, layout=layout)
        holders, fetched = recorded.holders(), recorded.fetched()
        seen = [
            {k for q in range(32) if holders[q] == rank for k in range(max(e for e in ends if e <= q), q + 1)}
            for rank in range(4)
        ]
        for rank in range(4):
            assert fetched[rank] == {k for k in seen[rank] if holders[k] != rank}
    assert list(map(len, fetched)) == place(lengths, 4).traffic().sum(1).tolist()
    assert recorded.balance() == place(lengths, 4).balance
    words = f"draw --plot {tmp_path}/x.svg --provider needed --ranks 4 --layout documents --documents 11,7,5,5,3,1"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    assert "Packed attention matrix" in (tmp_path / "x.svg").read_text()
