"""The search finds what an exhaustive one finds, obeys restrictions, explains itself, and refuses bad queries."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from dataclasses import replace
from itertools import dropwhile, groupby, product, takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
from nightly import nightly, one_case
from rich.console import Console
from typer.testing import CliRunner

from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.common.recent import Recent
from cp_plugin.engine.core import layout
from cp_plugin.engine.core.mask import Window
from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Fp8, Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.planner.candidates import Allowed, candidates, variants
from cp_plugin.planner.errors import KNOWN_ERROR, OWN, off_by, typical_error
from cp_plugin.planner.explain import gain
from cp_plugin.planner.machine.hardware import cluster
from cp_plugin.planner.packs import pairs
from cp_plugin.planner.price import Priced, computes, least, place_on, price
from cp_plugin.planner.query import Fixed, Query, from_name, keep_fitting
from cp_plugin.planner.search import Plan, answer, find_faster
from cp_plugin.planner.trace.program import program
from cp_plugin.planner.training.footprint import footprint
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel, Recompute, problem, selections
from cp_plugin.tools.app import app
from cp_plugin.tools.show_plan import as_json, flags, fold, print_plan, sizes, why

SHAPE = Parallel(devices=16, context=16, seq_length=2**17, recompute="full")
LLAMA, SLOW = model("llama3-8b"), cluster("h100-1-per-node")
PROBLEM = Problem(size=8, heads=8, kv_heads=4, seq_length=2**15)
DENSE = {*providers.names()} - {"needed"}
"""Providers considered where every key is seen."""


QUERY = Query(model=LLAMA, shapes=[SHAPE], cluster=SLOW)
ON_DGX = replace(QUERY, cluster=cluster("dgx-h100"))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return answer(QUERY)


def test_finds_what_exhaustive_search_finds(plan: Plan) -> None:
    """Every candidate and all its variants, against the few that were simulated; none undercuts its lower bound."""
    its = place_on(problem(LLAMA, SHAPE), SLOW, 1)
    every = [c for some in candidates(its).values() for c in some]
    every += [v for c in every for v in variants(c)]
    seconds = []
    for candidate in every:
        priced, bound = price(candidate, LLAMA, SHAPE, SLOW), least(candidate, SLOW, 1)
        assert bound.forward <= priced.main.forward.seconds * (1 + 1e-9), candidate.flags
        assert bound.backward <= priced.main.backward.seconds * (1 + 1e-9), candidate.flags
        seconds.append(priced.iteration.seconds)
    assert min(p.iteration.seconds for p in plan.methods) <= min(seconds) * 1.02
    assert plan.simulated < len(every) / 2


def test_no_more_is_simulated_than_tried() -> None:
    """Of a method with one candidate the variants are tried, too."""
    only = Allowed(options=Options(intra_size=2, backward="q"))
    plan = answer(replace(QUERY, allowed=only))
    assert 1 < plan.simulated <= plan.tried


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (Options(grid=(4, 2)), {"attention2d"}),
        (Options(intra_size=2), {"burst", "double_ring"}),
        (Options(head_parallel=2, head_groups=2), {"attention2d", "all_gather"}),
        (Options(fp8="comm"), DENSE),
        (Options(gradient_dtype="model"), DENSE),
        (Options(grid=(2, 2), intra_size=2), set()),
    ],
)
def test_fixed_options_stay(options: Options, names: set[str]) -> None:
    allowed = Allowed(options=options)
    ours = [c for some in candidates(PROBLEM, allowed=allowed).values() for c in some if not c.upstream]
    assert {c.name for c in ours} == names
    every = ours + [other for c in ours for other in variants(c, allowed)]
    for name, value in options.chosen.items():
        assert all(getattr(c.setup.options, name) == value for c in every if name in c.setup.provider.options)


def test_restrictions() -> None:
    zigzag = Allowed(layouts=["zigzag"], stock=False)
    by_name = candidates(PROBLEM, allowed=zigzag)
    every = [c for some in by_name.values() for one in some for c in (one, *variants(one, zigzag))]
    assert {c.setup.layout for c in every} == {"zigzag"}
    assert "attention2d" in {c.name for c in every} and not any(c.upstream for c in every)
    nothing = Allowed(stock=False, refused="a rule")
    shape = Parallel(devices=8, context=8, seq_length=8192, recompute="full")
    assert not answer(replace(ON_DGX, shapes=[shape], allowed=nothing)).methods


@pytest.mark.parametrize("name", ["burst", "attention2d", "ring"])
def test_programs_are_reproducible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches filled by the first call must not change its cost, or ranks would plan differently."""
    setup = settled(providers.get(name), PROBLEM, Options(head_parallel=2))
    monkeypatch.setattr(layout, "_orders", Recent(layout.KEPT_BYTES, layout._nbytes))
    first, second = (dataclasses.asdict(program(setup, 7)) for _ in range(2))
    assert first == second


def test_the_simplest_of_a_tie_is_named(plan: Plan) -> None:
    """Who ties is beaten by nobody beyond the typical error of the two; all others are."""

    def beaten(p: Priced, q: Priced) -> bool:
        return p.iteration.seconds > (1 + typical_error(p.provider, q.provider)) * q.iteration.seconds * (1 + 1e-9)

    tied, slower = plan.methods[: plan.tied], plan.methods[plan.tied :]
    assert len(tied) > 1 and not any(beaten(p, q) for p in tied for q in plan.methods)
    assert all(any(beaten(p, q) for q in tied) for p in slower)
    assert any(p.iteration.seconds > (1 + KNOWN_ERROR) * plan.fastest for p in slower)
    simple = [(not p.candidate.upstream, p.candidate.name != "stock p2p", len(p.candidate.flags.split())) for p in tied]
    assert simple == sorted(simple) and slower == sorted(slower, key=lambda p: p.iteration.seconds)
    text = "\n".join(why(plan))
    assert f"tie: {tied[1].candidate.name}" in text and f"{plan.best.candidate.name} is named as" in text


def test_ratios_and_their_typical_errors(plan: Plan) -> None:
    """No figure reads as a bound, and what ties is said to."""
    console = Console(width=120, file=io.StringIO())
    print_plan(console, plan)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "±" not in text
    assert f"typical error 10 %; {'; '.join(f'{n} {100 * e:.0f} %' for n, e in OWN.items())}" in text
    joined = re.search(r"within 1 % of (.*?): (.*?)\n(?=typical)", text, re.S)
    others = [] if joined is None else joined[2].replace("\n", " ").split(", ")
    rest = [(n, p) for n, p in enumerate(plan.methods) if p.candidate.name not in others]
    assert len(rest) + len(others) == len(plan.methods)
    for number, priced in rest:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{priced.candidate.name} ") and "B  " in line]
        ratio = priced.iteration.seconds / plan.fastest
        assert (" tie" in line) == (number < plan.tied) != (f"{ratio:.2f}x" in line)
        assert (" tie, simplest " in line) == (number == 0)
        if number >= plan.tied:
            by = plan.beating(priced)
            assert by is not None and f"{priced.candidate.name} takes" in text
            assert f"{by.candidate.name}'s time ({off_by(priced.provider, by.provider)})" in text
    told = as_json(plan)
    assert [m["typical_error"] for m in told["methods"]] == [typical_error(p.provider) for p in plan.methods]
    assert told["tied"][0] == told["methods"][0]["method"] and told["methods"][0]["flags"] == flags(plan.best)


def test_a_gain_is_named_by_its_causes(plan: Plan) -> None:
    """In one shape stock loses by the attention it repeats, which is told, and its best method says so by a factor."""
    theirs = next(p for p in plan.methods[plan.tied :] if p.candidate.upstream)
    parts = gain(plan, plan.best, theirs)
    assert gain(plan, plan.best, theirs) is parts, "simulated once"
    assert math.prod(parts[:3]) == pytest.approx(theirs.iteration.seconds / plan.best.iteration.seconds)
    assert parts.named[0][0] == "attention not repeated" and parts.shape == pytest.approx(1)
    assert parts.method == pytest.approx(
        (theirs.iteration.seconds - theirs.repeats) / plan.best.iteration.seconds, rel=0.05
    )
    assert f"): {parts}" in (text := "\n".join(why(plan))) and f"{theirs.candidate.name} takes" in text


def test_a_clear_gain_is_no_tie_because_another_is_uncertain() -> None:
    """Ulysses beats stock beyond their error; that ATTENTION2D, of a larger one, is faster still changes nothing."""
    seconds = {"attention2d": 1.0, "ulysses": 1.02, "ring": 1.2}
    priced = [SimpleNamespace(provider=name, iteration=SimpleNamespace(seconds=s)) for name, s in seconds.items()]
    assert [find_faster(one, priced) for one in priced] == [None, None, priced[1]]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_stock_repeats_attention_under_recomputation(recompute: Recompute) -> None:
    """Ours keeps its output; stock Megatron runs its forward once more, messages included, and keeps less."""
    shape = replace(SHAPE, recompute=recompute)
    by_name = candidates(place_on(problem(LLAMA, shape), SLOW, 1))
    theirs, ours = (price(by_name[name][0], LLAMA, shape, SLOW) for name in ("stock p2p", "ring"))
    expected = 0.0 if recompute == "none" else LLAMA.layers * theirs.main.forward.seconds
    assert theirs.repeats == pytest.approx(expected) and ours.repeats == 0
    assert (theirs.footprint.total < ours.footprint.total) == (recompute != "none")


@nightly
def test_each_side_in_its_own_best_shape() -> None:
    """As good as each side searched alone; stock may recompute what leaves attention's output."""
    query = keep_fitting(from_name("llama3-8b", 64, 2**19, "dgx-h100", Fixed()))
    both = answer(query)
    for upstream in (False, True):
        own = [p for p in both.methods if p.candidate.upstream == upstream]
        assert len({sizes(p.parallel) for p in own}) == 1
        every = [k for shape in query.shapes for k in (shape, *selections(query.model, shape))]
        only = Allowed(refused="a rule") if upstream else Allowed(stock=False)
        some = answer(replace(query, shapes=every, free=False, allowed=only))
        assert min(p.iteration.seconds for p in own) <= (1 + KNOWN_ERROR) * some.fastest
    assert both.best.candidate.upstream and both.best.repeats == 0
    shown = flags(both.best)
    assert "--recompute-granularity selective --recompute-modules mlp " in shown and "--cp-comm-type" in shown


def test_without_context_parallelism_stock_is_named() -> None:
    shape = Parallel(devices=8, tensor=8, seq_length=4096, sequence_parallel=True)
    plan = answer(replace(ON_DGX, shapes=[shape], free=True))
    assert plan.best.candidate.name == "stock" and "--cp-" not in flags(plan.best)


@pytest.mark.parametrize(
    ("size", "kv_heads", "shared"), [(8, 8, {2, 4}), (16, 8, {2, 4, 8}), (8, 2, {2}), (8, 1, set())]
)
def test_upstreams_all_to_all_divides_key_value_heads(size: int, kv_heads: int, shared: set[int]) -> None:
    """Transformer Engine does not repeat them, as ours does."""
    by_name = candidates(Problem(size=size, heads=16, kv_heads=kv_heads))
    assert {c.setup.options.head_parallel for c in by_name.get("stock a2a+p2p", [])} == shared
    assert bool(by_name.get("stock a2a")) == (kv_heads % size == 0)


@one_case
@pytest.mark.parametrize("fp8", [(None,), (None, "comm")])
def test_all_lines_fit_the_terminal(plan: Plan, fp8: tuple[Fp8 | None, ...]) -> None:
    query = replace(QUERY, model=model("llama2-7b"), shapes=[replace(SHAPE, seq_length=2**15)], fp8=fp8)
    for one, width in product((plan, answer(query, hopeless=math.inf)), (80, 100)):
        console = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
        print_plan(console, one)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= width
        table = dropwhile(lambda line: not line.startswith("method "), lines)
        rows = [line for line in takewhile(lambda line: not line.startswith("takes:"), table) if line[0] != " "][1:]
        by_shape = groupby(one.methods, lambda p: sizes(p.parallel))
        names = [alike[0].candidate.name for _, some in by_shape for alike in fold(list(some))]
        assert [row.split()[0] for row in rows] == [name.split()[0] for name in names]
        pasted = " ".join(line.strip(" \\") for line in lines if line.startswith("    --"))
        assert pasted == flags(one.best), "they can be pasted into a shell"


def test_answer_has_every_method_and_the_winners_flags(plan: Plan) -> None:
    shown = {p.candidate.name for p in plan.methods} | {lost.name for lost in plan.lost} | set(plan.cannot)
    assert DENSE | {"stock p2p", "stock all_gather", "stock a2a+p2p"} <= shown
    text = flags(plan.best)
    assert "--context-parallel-size 16" in text and "--recompute-granularity full" in text
    assert f"--cp-provider {plan.best.candidate.name}" in text or "--cp-comm-type" in text
    assert next(iter(why(plan))).startswith(plan.best.candidate.name)


def test_memory_limits_the_choice() -> None:
    shapes = [Parallel(devices=8, context=8, seq_length=2**20, recompute=again) for again in ("none", "full")]
    query = keep_fitting(from_name("llama3-8b", 64, 2**20, "dgx-h100", Fixed(context=64)))
    assert {s.recompute for s in query.shapes} == {"full"}
    with pytest.raises(ValueError, match=r"nothing fits: llama3-8b with 1048576 tokens on 8 devices needs at least"):
        answer(replace(ON_DGX, shapes=shapes, limit=30e9))


@nightly
def test_more_recomputation_where_attention_does_not_fit() -> None:
    """The least recomputation fits without the buffers of an attention call, and with no method's."""
    thin = replace(LLAMA, vocab=1024, ffn_hidden=1024)  # otherwise the loss needs as much memory at another time
    less, more = (replace(SHAPE, recompute=again) for again in ("none", "full"))
    limit = footprint(thin, less).total + 1
    alone, both = (answer(replace(QUERY, model=thin, shapes=some, limit=limit)) for some in ([less], [more, less]))
    assert not alone.fits(alone.best)
    assert both.fits(both.best) and both.best.parallel.recompute == "full"


@pytest.mark.parametrize("window", [(4095, 0), (2**15 - 2, 0), (100, 30), (-1, 7)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_is_bounded_by_what_it_shows(window: Window, causal: bool) -> None:
    windowed = replace(PROBLEM, window=window, causal=causal)
    setup = settled(providers.get("ring"), windowed, Options(layout="zigzag"))
    seen = sum(program(setup, index).pairs() for index in range(windowed.size))
    bound, free = (computes(its, SLOW, linear=False) for its in (windowed, replace(windowed, window=None)))
    assert pairs(windowed) * windowed.heads == seen
    assert bound.forward / free.forward == pytest.approx(
        pairs(windowed) / pairs(replace(windowed, window=None)), rel=1e-4
    )


def test_linear_layers_alone() -> None:
    """Each method once, none below its bound. lasp1 passes one state on: its busiest rank sends its formula."""
    layers = replace(LLAMA, attention_pattern="L", linear="basic")
    every = answer(replace(QUERY, model=layers), hopeless=math.inf).methods
    names = [one.candidate.name for one in every]
    assert len(set(names)) == len(names), "stock Megatron has none of them"
    for one in every:
        bound = least(one.candidate, SLOW, 1)
        assert bound.forward <= one.main.forward.seconds and bound.backward <= one.main.backward.seconds, names
    lasp1 = next(one for one in every if one.candidate.name == "lasp1")
    setup = lasp1.candidate.setup
    formulas = [setup.provider.traffic(setup.problem, setup.options, i) for i in range(SHAPE.context)]
    assert lasp1.sent == max(sum(formula.values()) for formula in formulas) > 0


def test_hybrid_layers_are_priced_by_kind() -> None:
    hybrid = replace(LLAMA, name="hybrid", attention_pattern="LLLN", linear="basic", layers=8)
    shape = Parallel(devices=8, context=8, seq_length=2**16, recompute="full")
    mixed, dense = (answer(replace(QUERY, model=m, shapes=[shape])) for m in (hybrid, LLAMA))
    assert set(mixed.best.timelines) == {"L", "N"}
    assert mixed.best.timelines["L"].seconds < dense.best.main.seconds / 3


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ["plan", "--model", "llama3-8b", "--cluster", "h100-1-per-node", "--devices", "8", "--context", "8"]
    words += ["--tensor", "1", "--pipeline", "1", "--seq-length", "65536"]
    picture = tmp_path / "plan.svg"
    done = CliRunner().invoke(app, [*words, "--json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert all(f">{method['method']}<" in picture.read_text() for method in answer["methods"])
    assert answer["methods"][0]["method"] == answer["tied"][0]
    assert "--context-parallel-size 8" in answer["methods"][0]["flags"]
    monkeypatch.setattr(Plan, "fits", lambda *_: False)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "nothing fits" in done.output, "the best of what does not fit is shown, and fails"
    assert re.search(r"planned in \d+\.\d s", done.output)
    assert "    --tensor-model-parallel-size 1" in done.output and answer["methods"][0]["method"] in done.output
