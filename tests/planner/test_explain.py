"""``cp-plugin plan --explain``: figures add up, free resources gain time, and bad queries are refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from nightly import one_case
from typer.testing import CliRunner

from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.explain import RESOURCES, Explanation, explain, split
from cp_plugin.planner.machine.hardware import cluster, override
from cp_plugin.planner.price import place_on, priced
from cp_plugin.planner.query import Query
from cp_plugin.planner.search import answer
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel, problem, selections
from cp_plugin.tools.app import app
from cp_plugin.tools.show_plan import flags

LLAMA = model("llama3-8b")
ASKED = ["plan", "--explain", "--model", "llama3-8b", "--cluster", "dgx-h100", "--seq-length", "65536"]


def explained(name: str, *, size: int = 4, per_node: int = 1, of_model: str = "llama3-8b") -> Explanation:
    of, machine = model(of_model), override(cluster("h100-1-per-node"), per_node=per_node, nics=per_node)
    shape = Parallel(devices=size, context=size, seq_length=2**15, recompute="full")
    setup = settled(providers.get(name), place_on(problem(of, shape), machine, 1), Options())
    return explain(of, shape, setup, machine)


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*ASKED, *arguments])


@pytest.mark.parametrize("name", [*providers.names(), "lasp2", "lasp1", "zeco", "linear_ring"])
def test_seconds_and_bytes_add_up(name: str) -> None:
    """On two nodes of two: seconds of each rank, and the bytes inside and between nodes."""
    linear = providers.get(name).kind == "linear"
    told = explained(name, per_node=2, of_model="linear-llama3-1b" if linear else "llama3-8b")
    for of in told.passes.values():
        assert set(split(of)) == set(range(4))
        for rank, parts in split(of).items():
            assert sum(parts.values()) == pytest.approx(of.seconds, rel=1e-12), rank
            assert min(parts.values()) >= -1e-15
    assert sum(of.seconds for of in told.passes.values()) == told.timeline.seconds
    attention = told.priced.iteration.attention
    assert attention == pytest.approx(told.model.layers * told.timeline.seconds), "attention is not repeated"
    sent: dict[tuple[str, str], float] = {}
    for (phase, axis, _), nbytes in told.sent.items():
        sent[phase, axis] = sent.get((phase, axis), 0) + nbytes
    ledgers = [dict(told.timeline.programs[rank].sent) for rank in range(4)]
    assert any(sent == pytest.approx(ledger) for ledger in ledgers)
    assert {level for _, _, level in told.sent} <= {"inter", "intra"}
    if name == "ulysses":
        inter, intra = (sum(n for (_, _, at), n in told.sent.items() if at == level) for level in ("inter", "intra"))
        assert inter / intra == pytest.approx(2), "two of the three peers are on the other node"


def test_free_kernels_and_free_links() -> None:
    """One stream of messages, whose order cannot change: a free resource never costs time."""
    told = explained("ulysses")
    assert set(told.free) == set(RESOURCES) and told.free[told.limit] == min(told.free.values())
    assert all(0 < seconds <= told.timeline.seconds * (1 + 1e-9) for seconds in told.free.values())
    parts = [split(of)[0] for of in told.passes.values()]
    assert told.free["kernels"] == pytest.approx(sum(p["memory"] + p["host"] + p["waiting"] for p in parts), rel=1e-6)
    own, posting = sum(p["kernels"] + p["memory"] + p["host"] for p in parts), told.timeline.cluster.device.host_post_s
    assert own <= told.free["inter"] <= own + 4 * posting, "four exchanges of heads, which the host posts"
    hidden = sum(p["kernels"] + p["waiting"] for p in parts)  # passes that overlap messages turn into waiting
    assert hidden <= told.free["memory"] <= told.timeline.seconds
    assert told.free["intra"] == told.timeline.seconds, "one device a node"


def test_memory_default_provider_and_many_ranks() -> None:
    done = cli("--provider", "ulysses", "--devices", "1", "--recompute", "none")
    assert done.exit_code == 1 and "does not fit 80 GB" in done.output
    done = cli("--devices", "8", "--tensor", "2", "--json")
    assert done.exit_code == 0 and "the planner's choice" in json.loads(done.output)["why"][0]
    assert list(explained("attention2d", size=16).timeline.programs) == [0, 8, 15], "few ranks stand for many"


def test_packed_documents() -> None:
    """Less compute than for one document, and only visible keys are sent."""
    alone, packed = (
        json.loads(cli("--provider", "needed", "--devices", "8", "--json", *more).output)
        for more in ((), ("--documents", "chat", "--layout", "documents"))
    )
    assert alone["parallel"]["documents"] == [] and sum(packed["parallel"]["documents"]) == 65536
    assert packed["seconds"] < alone["seconds"] / 2
    assert sum(one["bytes"] for one in packed["sent"]) < sum(one["bytes"] for one in alone["sent"]) / 2
    done = cli("--provider", "ring", "--devices", "8", "--documents", "chat")
    assert "documents in each sequence" in done.output


@one_case
@pytest.mark.parametrize("limit", [72e9, 76e9, 90e9])
def test_every_candidate_recomputes_what_takes_least_of_what_fits(limit: float) -> None:
    """Of all modules and numbers of layers, on both sides; without ``free`` only what was asked for."""
    full = Parallel(devices=8, context=8, seq_length=2**16, recompute="full")
    query = Query(model=LLAMA, shapes=[full], cluster=cluster("dgx-h100"), limit=limit, free=True)
    plan = answer(query)
    every = [full, *selections(LLAMA, full), *(replace(full, recompute_layers=n) for n in range(1, LLAMA.layers))]
    for one in plan.methods[:3]:
        prices = [priced(one.candidate, one.timelines, LLAMA, shape, cluster("dgx-h100")) for shape in every]
        best = min((p for p in prices if plan.fits(p)), key=lambda p: p.iteration.seconds)
        assert one.iteration.seconds == best.iteration.seconds and one.parallel.recompute == best.parallel.recompute
        assert one.parallel.recompute != "full" or f"block --recompute-num-layers {best.parallel.recompute_layers}" in (
            flags(one)
        )
    fixed = answer(replace(query, free=False))
    assert all(p.parallel.recompute_layers == 0 and p.parallel.recompute == "full" for p in fixed.methods)


def test_stock_keeps_the_sizes_in_which_it_fits() -> None:
    """Attention's output, which ours keeps, needs other sizes; stock is compared in those that suit it."""
    small, large = (
        Parallel(devices=16, context=n, seq_length=2**17, global_batch=2, recompute="full") for n in (8, 16)
    )
    limit = footprint(LLAMA, small).total - 1e8
    plan = answer(Query(model=LLAMA, shapes=[small, large], cluster=cluster("dgx-h100"), limit=limit))
    contexts = {stock: {p.parallel.context for p in plan.methods if p.candidate.upstream == stock} for stock in (0, 1)}
    assert contexts == {0: {16}, 1: {8}} and all(map(plan.fits, plan.methods[:2]))
