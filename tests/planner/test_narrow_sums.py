"""The planner with sums of gradients in the model's dtype: their bytes to the byte, and times that follow them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from cp_plugin.attention.setups import Setup, settled
from cp_plugin.cli.app import app
from cp_plugin.core.options import Options
from cp_plugin.core.problem import Problem
from cp_plugin.methods import registry as providers
from cp_plugin.planner.candidates import Candidate, composition
from cp_plugin.planner.machine import hardware
from cp_plugin.planner.machine.events import Post
from cp_plugin.planner.price import least
from cp_plugin.planner.trace.program import program
from cp_plugin.planner.trace.timeline import simulate

PROBLEM = Problem(size=8, heads=32, kv_heads=32, seq_length=2**15, hosts=tuple(f"node{n}" for n in range(8)))
SLOW = hardware.cluster("h100-1-per-node")
MODEL = Options(gradient_dtype="model")


def both(name: str, **options: object) -> tuple[Setup, Setup]:
    wide, narrow = (settled(providers.get(name), PROBLEM, Options(**options, **some)) for some in ({}, MODEL.chosen))
    assert wide.reason is None and narrow.reason is None
    return wide, narrow


SAVED = {
    "ring": 2 * 7 * PROBLEM.kv_elements,
    "all_gather": 2 * 7 * PROBLEM.kv_elements,
    "attention2d": 2 * 3 * PROBLEM.kv_elements + 2 * PROBLEM.q_elements,
}
CHOSEN: dict[str, dict[str, object]] = {
    "ring": {},
    "all_gather": {"head_groups": 1},
    "attention2d": {"grid": (4, 2), "head_groups": 1},
}


@pytest.mark.parametrize("name", SAVED)
def test_bytes_of_a_program_are_those_of_the_formula(name: str) -> None:
    sent = []
    for setup in both(name, **CHOSEN[name]):
        found = program(setup, 3)
        posted = sum(e.nbytes for e in found.backward if isinstance(e, Post))
        formula = setup.provider.traffic(PROBLEM, setup.options, 3)
        assert found.sent == formula
        assert posted == sum(n for (phase, _), n in formula.items() if phase == "backward")
        sent.append(posted)
    assert sent[0] - sent[1] == SAVED[name]


@pytest.mark.parametrize("name", SAVED)
def test_slow_links_are_busy_for_less_time_by_those_bytes(name: str) -> None:
    """A call that they bind: 4k local tokens of equal heads, a GPU on each node. It gains what the bytes take."""
    wide, narrow = (simulate(s, PROBLEM, cluster=SLOW, ranks="busiest") for s in both(name, **CHOSEN[name]))
    assert narrow.forward_s == wide.forward_s
    gain = wide.backward_s - narrow.backward_s
    verb = "exchange" if name == "ring" else "reduce_scatter"
    link = SAVED[name] / SLOW.inter.of(verb).bytes_per_s
    assert 0.9 * link <= gain <= 1.1 * link, (gain, link)


def test_lower_bounds_follow() -> None:
    bounds = []
    for setup in both("ring"):
        found = least(Candidate(name="ring", setup=setup, flags=""), SLOW, 1)
        bounds.append(found.backward)
    assert bounds[1] < bounds[0]


def test_they_are_not_priced_as_one() -> None:
    wide, narrow = both("ring")
    assert composition(wide) != composition(narrow)


def test_the_command() -> None:
    """All of our methods that sum send no more, by the flag that is printed; those of upstream are as they were."""
    asked = ("--model", "llama3.2-1b", "--cluster", "h100-1-per-node", "--devices", "8", "--context", "8", "--json")
    wide, narrow = (
        {row["method"]: row for row in json.loads(CliRunner().invoke(app, ["plan", *asked, *more]).stdout)["methods"]}
        for more in ((), ("--gradient-dtype", "model"))
    )
    assert {"ring", "all_gather", "upstream p2p"} <= wide.keys() & narrow.keys()
    for name in wide.keys() & narrow.keys():
        before, after = wide[name], narrow[name]
        summed = "--cp-gradient-dtype model" in after["flags"]
        assert summed == (not name.startswith("upstream") and "gradient_dtype" in providers.get(name).options)
        if summed:
            assert after["attention_sent"] <= before["attention_sent"], name  # equal behind a head axis of all ranks
        else:
            assert after == before
    assert any(narrow[name]["attention_sent"] < row["attention_sent"] for name, row in wide.items() if name in narrow)
    refused = CliRunner().invoke(app, ["plan", *asked[:6], "--decode", "--gradient-dtype", "model"])
    assert refused.exit_code == 2 and "--gradient-dtype model is for a training" in refused.stderr
