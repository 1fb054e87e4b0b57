"""The search finds what trying everything would find, says why, and refuses what cannot be."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from itertools import dropwhile, takewhile
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cp_plugin.attention.setups import settled
from cp_plugin.cli.app import app
from cp_plugin.cli.show_plan import as_json, flags, print_plan, why
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Fp8, Problem
from cp_plugin.methods import registry as providers
from cp_plugin.planner.asked import Fixed, fitting, of_name
from cp_plugin.planner.candidates import candidates, composition, variants
from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.price import least, on, price
from cp_plugin.planner.search import KNOWN_ERROR, Plan, over, plan
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel, Recompute, problem

SHAPE = Parallel(devices=16, context=16, seq_length=2**17, recompute="full")
LLAMA, SLOW = model("llama3-8b"), cluster("h100-1-per-node")


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(LLAMA, [SHAPE], SLOW)


def test_it_finds_what_trying_everything_finds(found: Plan) -> None:
    """Every candidate and all its variants, against the few that were simulated."""
    given = on(problem(LLAMA, SHAPE), SLOW, 1)
    every = [c for some in candidates(given).values() for c in some]
    every += [v for c in every for v in variants(c)]
    alike = {composition(c.setup): c for c in every}
    seconds = {c.flags: price(c, {}, LLAMA, SHAPE, SLOW).iteration.seconds for c in alike.values()}
    assert min(p.iteration.seconds for p in found.found) <= min(seconds.values()) * 1.02
    assert found.simulated < len(alike) / 2


def test_of_methods_that_tie_the_fewest_bytes_win(found: Plan) -> None:
    tie, slower = found.found[: found.tied], found.found[found.tied :]
    fastest = min(p.iteration.seconds for p in found.found)
    assert len(tie) > 1 and max(p.iteration.seconds for p in tie) <= (1 + KNOWN_ERROR) * fastest
    assert [p.sent for p in tie] == sorted(p.sent for p in tie)
    seconds = [p.iteration.seconds for p in slower]
    assert seconds == sorted(seconds) and seconds[0] > (1 + KNOWN_ERROR) * fastest
    text = "\n".join(why(found))
    assert f"tie: {tie[1].candidate.name}" in text and f"{found.best.candidate.name} sends fewest bytes" in text


def test_an_answer_says_how_sure_it_is(found: Plan) -> None:
    """A ratio that is beyond the known error carries it; one within is no ratio but a tie."""
    assert [over(s, 1.0, alone=False) for s in (1.0, 1 + KNOWN_ERROR, 1.24)] == [
        "tie",
        "tie",
        f"1.24x ± {KNOWN_ERROR:.0%}",
    ]
    assert over(1.0, 1.0, alone=True) == "1.00x" and over(0.5, 1.0, alone=True).startswith("0.50x ±")
    console = Console(width=120, file=io.StringIO())
    print_plan(console, found)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    for number, priced in enumerate(found.found):
        (line,) = [line for line in lines if line.startswith(f"{priced.candidate.name} ") and "B  " in line]
        ratio = priced.iteration.seconds / found.fastest
        assert (" tie " in line) == (number < found.tied) != (f"{ratio:.2f}x ± " in line)
    assert as_json(found)["error"] == KNOWN_ERROR


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_stock_megatron_repeats_attention_under_recomputation(recompute: Recompute) -> None:
    """Ours keeps its output; stock Megatron runs its forward once more, messages included, and keeps less."""
    shape = replace(SHAPE, recompute=recompute)
    given = candidates(on(problem(LLAMA, shape), SLOW, 1))
    theirs, ours = (price(given[name][0], {}, LLAMA, shape, SLOW) for name in ("upstream p2p", "ring"))
    expected = 0.0 if recompute == "none" else LLAMA.layers * theirs.main.forward_s
    assert theirs.repeats == pytest.approx(expected) and ours.repeats == 0
    assert theirs.without_repeats == pytest.approx(theirs.iteration.seconds - expected)
    assert (theirs.footprint.total < ours.footprint.total) == (recompute != "none")


def test_what_upstream_repeats_is_said_with_what_it_takes_without(found: Plan) -> None:
    theirs = next(p for p in found.found if p.candidate.upstream)
    ratio = theirs.without_repeats / found.fastest
    assert f"{theirs.candidate.name} takes" in (text := "\n".join(why(found)))
    assert f"as stock Megatron does ({ratio:.2f}x where memory allows not to)" in text


@pytest.mark.parametrize(
    ("size", "kv_heads", "shared"), [(8, 8, {2, 4}), (16, 8, {2, 4, 8}), (8, 2, {2}), (8, 1, set())]
)
def test_upstreams_all_to_all_divides_key_value_heads(size: int, kv_heads: int, shared: set[int]) -> None:
    """Transformer Engine does not repeat them, as ours does."""
    found = candidates(Problem(size=size, heads=16, kv_heads=kv_heads))
    assert {c.setup.options.head_parallel for c in found.get("upstream a2a+p2p", [])} == shared
    assert bool(found.get("upstream a2a")) == (kv_heads % size == 0)


@pytest.mark.parametrize("fp8", [(None,), (None, "comm")])
def test_the_table_fits_a_terminal_of_100_columns(found: Plan, fp8: tuple[Fp8 | None, ...]) -> None:
    slow = plan(model("llama2-7b"), [replace(SHAPE, seq_length=2**15)], SLOW, fp8=fp8, hopeless=math.inf)
    for one in (found, slow):
        console = Console(width=100, force_terminal=True, color_system=None, file=io.StringIO())
        print_plan(console, one)
        lines = iter(console.file.getvalue().splitlines())  # type: ignore[attr-defined]
        rows = list(
            takewhile(
                lambda line: not line.startswith("takes:"), dropwhile(lambda line: not line.startswith("━"), lines)
            )
        )[1:]
        assert max(map(len, rows)) <= 100 and "…" not in "".join(rows)
        assert [row.split()[0] for row in rows] == [p.candidate.name.split()[0] for p in one.found]


def test_no_candidate_undercuts_its_bound() -> None:
    given = on(problem(LLAMA, SHAPE), SLOW, 1)
    for some in candidates(given).values():
        for candidate in some[::4]:
            bound, timeline = least(candidate, SLOW, 1), price(candidate, {}, LLAMA, SHAPE, SLOW).main
            assert bound.forward <= timeline.forward_s * (1 + 1e-9), candidate.flags
            assert bound.backward <= timeline.backward_s * (1 + 1e-9), candidate.flags


def test_every_provider_and_every_upstream_method_is_in_it(found: Plan) -> None:
    shown = {p.candidate.name for p in found.found} | {lost.name for lost in found.lost} | set(found.cannot)
    assert set(providers.names()) - {"needed"} <= shown
    assert {"upstream p2p", "upstream all_gather", "upstream a2a+p2p"} <= shown


@pytest.mark.parametrize(
    ("changes", "offered"), [({}, False), ({"window": (1023, 0)}, True), ({"documents": True}, True)]
)
def test_fetching_what_is_seen_is_offered_where_something_is_not_seen(changes: dict[str, Any], offered: bool) -> None:
    assert ("needed" in candidates(Problem(size=8, heads=8, kv_heads=8, **changes))) == offered


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, {"p2p", "all_gather", "a2a", "a2a+p2p"}),
        ({"window": (1023, 0)}, {"all_gather", "a2a"}),
        ({"sink": True}, {"a2a"}),
    ],
)
def test_upstream_is_offered_what_it_can_do(changes: dict[str, Any], names: set[str]) -> None:
    given = Problem(size=8, heads=8, kv_heads=8, **changes)
    offered = {name for name, some in candidates(given).items() if name.startswith("upstream") and some}
    assert offered == {f"upstream {name}" for name in names}


def test_the_flags_are_those_of_the_winner(found: Plan) -> None:
    text = flags(found.best)
    assert "--context-parallel-size 16" in text and "--recompute-granularity full" in text
    assert f"--cp-provider {found.best.candidate.name}" in text or "--cp-comm-type" in text
    assert next(iter(why(found))).startswith(found.best.candidate.name)


def test_methods_that_are_alike_are_one() -> None:
    """USP is a ring behind a head axis; on other tokens, or with other axes, it is not."""
    given = Problem(size=8, heads=8, kv_heads=8)
    usp, ring, other, double = (
        settled(providers.get(name), given, options)
        for name, options in (
            ("usp", Options(head_parallel=4, layout="zigzag")),
            ("ring", Options(head_parallel=4, layout="zigzag")),
            ("ring", Options(head_parallel=2, layout="zigzag")),
            ("double_ring", Options(head_parallel=4, layout="zigzag", intra_size=1)),
        )
    )
    assert composition(usp) == composition(ring)
    assert composition(usp) != composition(other)
    assert composition(usp) != composition(double), "its sums have a process group of their own"


def test_memory_decides() -> None:
    """What does not fit is not chosen, and where nothing does it says what would."""
    shapes = [Parallel(devices=8, context=8, seq_length=2**20, recompute=again) for again in ("none", "full")]
    asked = fitting(of_name("llama3-8b", 64, 2**20, "dgx-h100", Fixed(context=64)), 80e9)
    assert len(asked.shapes) == 1 and asked.shapes[0].recompute != "none"
    with pytest.raises(ValueError, match=r"nothing fits: llama3-8b with 1048576 tokens on 8 devices needs at least"):
        plan(LLAMA, shapes, cluster("dgx-h100"), limit=30e9)


def test_hybrid_and_window_layers_are_priced_each_by_their_own() -> None:
    hybrid = model("linear-llama3-1b").__class__(
        **{**{f: getattr(LLAMA, f) for f in LLAMA.__slots__}, "name": "hybrid", "attention_pattern": "LLLN",
           "linear": "basic", "layers": 8}
    )  # fmt: skip
    shape = Parallel(devices=8, context=8, seq_length=2**16, recompute="full")
    mixed, dense = plan(hybrid, [shape], SLOW), plan(LLAMA, [shape], SLOW)
    assert set(mixed.best.timelines) == {"L", "N"}
    assert mixed.best.timelines["L"].seconds < dense.best.main.seconds / 3


def test_the_command(tmp_path: object) -> None:
    asked = ["plan", "--model", "llama3-8b", "--cluster", "h100-1-per-node", "--devices", "8", "--context", "8"]
    asked += ["--tensor", "1", "--pipeline", "1", "--seq-length", "65536"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["methods"][0]["method"] == answer["tied"][0]
    assert answer["methods"][0]["attention_sent"] == min(
        m["attention_sent"] for m in answer["methods"] if m["method"] in answer["tied"]
    )
    assert "--context-parallel-size 8" in answer["methods"][0]["flags"]
    shown = CliRunner().invoke(app, asked).output
    assert "flags: --tensor-model-parallel-size 1" in shown and answer["methods"][0]["method"] in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "llama3-9b", "--cluster", "dgx-h100"], "llama3-8b"),
        (["--model", "llama3-8b", "--cluster", "dgx-h1000"], "dgx-h100"),
        (["--model", "llama3-8b"], "--cluster: which one?"),
        (["--cluster", "dgx-h100"], "--model: which one?"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "12"], "nearest: 16"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "8", "--tensor", "3"], "--tensor 3"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--seq-length", "1000001"], "--seq-length 1000001"),
        (["--model", "llama3-405b", "--cluster", "dgx-h100", "--seq-length", "4194304"], "nothing fits"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--recompute", "fully"], "full"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--", "--num-layers", "2"], "give one of the two"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "0"], "--devices 0: write a whole number, 1"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--tensor", "0"], "--tensor 0: write a whole number, 1"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--context", "-1"], "--context -1: write a whole number"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--global-batch", "0"], "--global-batch 0: write a whole"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--memory", "nan"], "--memory nan: write GB of a device"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--memory", "-5"], "--memory -5.0: write GB of a device"),
        (["--model", "llama3-8b", "--cluster", "dgx-h100", "--recompute", ""], "unknown --recompute ''"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_a_line(given: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *given])
    assert done.exit_code == 2, done.output
    assert message in done.output and "Traceback" not in done.output
    assert done.output.strip().count("\n") == 0
