"""Stock Megatron's methods as Transformer Engine runs them: what is launched, copied, sent and waited for.

Nothing is measured: sizes of the passes follow from those of the tensors, and the order from Transformer Engine's code.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from cp_plugin.engine.core.problem import Problem
from cp_plugin.planner import stock_rules
from cp_plugin.planner.candidates import Candidate, candidates
from cp_plugin.planner.machine.events import Event, Memory, Post, Wait
from cp_plugin.planner.trace.program import Program, program
from cp_plugin.planner.trace.stock import stock_program

SIZE, TOKENS = 8, 2**15
DENSE = Problem(size=SIZE, heads=8, kv_heads=2, seq_length=TOKENS)
WINDOW = replace(DENSE, window=(1023, 0))
ENDS = (0, 10_000, 10_100, 30_000, TOKENS)
PACKED = replace(DENSE, bounds=ENDS, documents=True)
EQUAL = replace(DENSE, kv_heads=8)
MASKS = pytest.mark.parametrize(
    "problem", [DENSE, WINDOW, PACKED, EQUAL], ids=["dense", "window", "packed", "equal heads"]
)


def gathering(problem: Problem) -> Candidate:
    (one,) = candidates(problem)["stock all_gather"]
    return one


def traced(problem: Problem, index: int = 3) -> tuple[Program, Problem]:
    one = gathering(problem)
    return stock_program(one.setup, index), one.setup.problem


def passes(events: tuple[Event, ...]) -> list[int]:
    """Bytes of the passes over memory between two other events."""
    between, sums = [], 0
    for event in events:
        if isinstance(event, Memory):
            sums += event.nbytes
        else:
            between.append(sums)
            sums = 0
    return [*between, sums]


def kinds(events: tuple[Event, ...]) -> list[str]:
    """Without passes over memory."""
    return [e.verb if isinstance(e, Post) else type(e).__name__ for e in events if not isinstance(e, Memory)]


@MASKS
def test_nothing_runs_beside_a_message(problem: Problem) -> None:
    """Each gather and each scatter is waited for before anything else is launched or sent."""
    stock, _ = traced(problem)
    gathers, scatters = ["all_gather", "Wait"] * 2, ["reduce_scatter", "Wait"] * 2
    assert kinds(stock.forward) == [*gathers, "Attention"]
    assert kinds(stock.backward) == [*gathers, "Attention", *scatters]
    for events in (stock.forward, stock.backward):
        for event, after in pairwise(events):
            assert not isinstance(event, Post) or after == Wait(event.number)


@MASKS
def test_bytes_of_messages_and_passes(problem: Problem) -> None:
    """Whole keys and values are gathered, reordered, zeroed and scattered, whatever the mask; gradients in bfloat16."""
    stock, p = traced(problem)
    whole = p.seq_length * p.kv_heads * p.head_dim * 2
    queries = p.seq_length // SIZE * p.heads * p.head_dim * 2
    ids, lse = 2 * SIZE * 4, p.seq_length // SIZE * p.heads * 4
    posts = [e for e in (*stock.forward, *stock.backward) if isinstance(e, Post)]
    assert [post.nbytes for post in posts] == [whole // SIZE * (SIZE - 1)] * 6
    in_order = 2 * (2 * whole + ids)
    # results that packed documents' kernels only write in part: both chunks' output, dq, dk and dv, and the whole dq
    zeroed = queries if p.bounds else 0, whole if p.bounds else 0
    assert passes(stock.forward) == [0, 0, 0, 0, in_order + queries + 2 * zeroed[0], 2 * queries]
    # the slices that both chunks' kernels were given, read twice and written once, for keys and values
    chunks = (3, 2 * SIZE - 1 - 3)
    own = 2 * p.seq_length if p.bounds else sum(slice_of(p, n) for n in chunks)
    added = 2 * 3 * whole * own // p.seq_length
    # gradients of every query head, written and read, for the keys beyond as many as there are queries
    seen = [(n + 1) * p.seq_length // (2 * SIZE) if p.bounds else slice_of(p, n) for n in chunks]
    if p.heads > p.kv_heads:
        added += sum(2 * (n - p.seq_length // (2 * SIZE)) * p.heads * 2 * p.head_dim * 2 for n in seen)
    statistics = 2 * lse if p.bounds else lse
    before, copied = 2 * whole + zeroed[0], 2 * queries
    zero = 2 * (zeroed[0] + 2 * zeroed[1])
    expected = [before, 0, 0, 0, in_order + 2 * queries + statistics + zero, copied + added + in_order, 0, 0, 0, 0]
    assert passes(stock.backward) == expected


def slice_of(problem: Problem, number: int) -> int:
    """Keys from the first that the chunk's first query sees to its last."""
    chunk = problem.seq_length // (2 * SIZE)
    seen = problem.window[0] if problem.window is not None else problem.seq_length
    return (number + 1) * chunk - max(0, number * chunk - seen)


@MASKS
def test_kernels_see_what_the_mask_shows(problem: Problem) -> None:
    """As many pairs, over all ranks, as our own method."""
    one = gathering(problem)
    ours, theirs = (sum(make(one.setup, i).pairs() for i in range(SIZE)) for make in (program, stock_program))
    assert ours == theirs > 0


def test_other_methods_move_what_ours_do() -> None:
    """With gradients of keys and values half as wide."""
    by_name = candidates(replace(DENSE, kv_heads=8))
    for name in ("stock p2p", "stock a2a", "stock a2a+p2p"):
        setup = by_name[name][0].setup
        ours, theirs = program(setup, 0), stock_program(setup, 0)
        assert ours.forward == theirs.forward and len(ours.backward) == len(theirs.backward)
        changed = [(a, b) for a, b in zip(ours.backward, theirs.backward, strict=True) if a != b]
        assert all(isinstance(a, Post) and isinstance(b, Post) and a.nbytes == 2 * b.nbytes for a, b in changed)
        assert bool(changed) == ("p2p" in name)


def test_rules_name_their_versions_and_decide_the_candidates() -> None:
    """What a rule does not name is not planned."""
    for rule in stock_rules.RULES:
        assert rule.what in str(rule) and set(rule.since) <= set(stock_rules.COMM_TYPES)
        assert all(version in str(rule) for version in rule.since.values())
        newest = max(tuple(map(int, version.split("."))) for version in rule.since.values())
        assert newest <= tuple(map(int, stock_rules.VERSION.split(".")))
    for problem, rule in (
        (WINDOW, stock_rules.WINDOWS),
        (replace(DENSE, sink=True), stock_rules.SINKS),
        (PACKED, stock_rules.DOCUMENTS),
    ):
        by_name = candidates(replace(problem, kv_heads=8))
        offered = {name.split()[1] for name, some in by_name.items() if name.startswith("stock ") and some}
        assert offered == set(rule.since)
