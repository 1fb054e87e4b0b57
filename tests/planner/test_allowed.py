"""Searches that may not choose everything; and that the same is found however often one looks."""

from __future__ import annotations

import dataclasses

import pytest

from cp_plugin.attention.setups import settled
from cp_plugin.core import layout
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import Allowed, candidates, variants
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.search import plan
from cp_plugin.planner.trace.program import program
from cp_plugin.planner.training.model import model
from cp_plugin.planner.training.parallel import Parallel

PROBLEM = Problem(size=8, heads=8, kv_heads=4, seq_length=2**15)
ALL_KEYS = {*providers.names()} - {"needed"}
"""Those that are a choice where every key is seen by somebody everywhere."""


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (Options(grid=(4, 2)), {"attention2d"}),
        (Options(intra_size=2), {"burst", "double_ring"}),
        (Options(head_parallel=2, head_groups=2), {"attention2d", "all_gather"}),
        (Options(fp8="comm"), ALL_KEYS),
        (Options(gradient_dtype="model"), ALL_KEYS),
        (Options(grid=(2, 2), intra_size=2), set()),
    ],
)
def test_what_is_chosen_already_stays(options: Options, names: set[str]) -> None:
    allowed = Allowed(options=options)
    found = candidates(PROBLEM, allowed=allowed)
    ours = [c for some in found.values() for c in some if not c.upstream]
    assert {c.name for c in ours} == names
    every = ours + [other for c in ours for other in variants(c, allowed)]
    for name, value in options.chosen.items():
        assert all(getattr(c.setup.options, name) == value for c in every if name in c.setup.provider.options)


def test_layouts_and_what_else_suits() -> None:
    zigzag = Allowed(layouts=["zigzag"], suits=lambda candidate: candidate.name != "ring")
    found = candidates(PROBLEM, allowed=zigzag)
    every = [c for some in found.values() for one in some for c in (one, *variants(one, zigzag))]
    assert {c.setup.layout for c in every} == {"zigzag"}
    assert "attention2d" in {c.name for c in every} and "ring" not in {c.name for c in every}


def test_nothing_may_be_chosen() -> None:
    nothing = Allowed(suits=lambda candidate: False)
    shape = Parallel(devices=8, context=8, seq_length=8192, recompute="full")
    assert not plan(model("llama3-8b"), [shape], hardware.cluster("dgx-h100"), allowed=nothing).found


@pytest.mark.parametrize("name", ["burst", "attention2d", "ring"])
def test_a_program_is_the_same_the_second_time(name: str) -> None:
    """What ranks remember from call to call is no cost of the first one, or ranks would plan differently."""
    setup = settled(providers.get(name), PROBLEM, Options(head_parallel=2))
    layout._orders.clear()
    first, second = (dataclasses.asdict(program(setup, 7)) for _ in range(2))
    assert first == second
