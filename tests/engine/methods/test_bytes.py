"""Ledger = trace = closed formula, to the byte: every method and setting, with FP8 payloads and narrow sums."""

from __future__ import annotations

import json

import pytest
import torch
from method_cases import EVERY, SETTINGS, count_on_the_wire, predict, setup_of, traced
from nightly import NIGHT, nightly
from typer.testing import CliRunner

from cp_plugin.engine.methods import registry as providers
from cp_plugin.engine.methods.attention2d import grid_bytes
from cp_plugin.engine.methods.protocol import Formula
from cp_plugin.tools.app import app

FIRST = {f"{name} on {providers.get(name).layouts[0]}" for name in providers.names()} | {
    name for name, (_, size, _) in SETTINGS.items() if size == 4
}
"""What every change runs with smaller messages: each provider on its first layout, and settings of 4 ranks."""
FP8, NARROW = {"fp8": "comm"}, {"gradient_dtype": "model"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=nightly if EVERY[n][1] > 4 else ()) for n in EVERY])
def test_ledger_trace_and_formula_agree(name: str) -> None:
    count_on_the_wire(setup_of(name, dtype=torch.float64))
    traced(setup_of(name, causal=False))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FIRST else nightly) for n in EVERY])
def test_smaller_payloads_and_sums(name: str) -> None:
    """FP8 payloads, gradient sums in the model's dtype where there are any, and both."""
    dtype = torch.float16 if len(name) % 2 else torch.bfloat16
    packed = setup_of(name, dtype=dtype, **FP8)
    exact = predict(packed, fp8=None)
    if "gradient_dtype" not in packed.provider.options:
        assert all(total(sent) < total(wide) for sent, wide in zip(count_on_the_wire(packed), exact, strict=True))
        return
    some = any if packed.provider.name == "needed" else all  # the ends of a contiguous sequence only send, or only sum
    alone = traced if NIGHT else predict  # by day its trace is that with narrow sums, which is the longest of all
    assert some(total(sent) < total(wide) for sent, wide in zip(alone(packed), exact, strict=True))
    count_on_the_wire(setup_of(name, dtype=dtype, **FP8, **NARROW))
    narrow = setup_of(name, dtype=dtype, **NARROW)
    less = []
    for sent, wide in zip(traced(narrow), predict(narrow, gradient_dtype=None), strict=True):
        assert total(sent, "forward") == total(wide, "forward") and total(sent) <= total(wide)
        less.append(total(sent) < total(wide))
    assert some(less) or narrow.axes.get("head") == narrow.problem.size


@pytest.mark.parametrize("name", [n for n in EVERY if EVERY[n][0] == "attention2d" and "head" not in n])
def test_a_grid_is_chosen_by_its_busiest_rank(name: str) -> None:
    """On uneven tokens the ranks of the diagonal, of which rank 0 is one, keep their shard."""
    setup = setup_of(name)
    most = grid_bytes(setup.problem, setup.options, setup.options.grid)
    assert most == max(total(sent) for sent in predict(setup))


def total(sent: Formula, phase: str = "") -> int:
    return sum(n for line, n in sent.items() if line[0].startswith(phase))


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (("--fp8", "comm", "--gradient-dtype", "model"), FP8 | NARROW),
        pytest.param(("--fp8", "comm"), FP8, marks=nightly),
        pytest.param(("--gradient-dtype", "model"), NARROW, marks=nightly),
    ],
)
def test_on_processes_bytes_and_results(flags: tuple[str, ...], chosen: dict[str, str]) -> None:
    """Real Gloo ranks, through the commands; every change runs one provider for each kind of message."""
    names = [*providers.names(), *providers.names("linear")] if NIGHT else ["ring", "ulysses", "lasp2"]
    small = ("--ranks", "4", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", *flags, "--json")
    small += tuple(f"--provider={name}" for name in names)
    ran = CliRunner().invoke(app, ["traffic", "--measure", "--seq-length", "96", *small])
    assert ran.exit_code == 0, ran.output
    rows = {row["provider"]: row for row in json.loads(ran.stdout)["rows"] if row.get("measured") == "equal"}
    assert set(rows) == set(names)
    assert rows["ring"]["chosen"] == chosen and rows["ring"]["over_ring"] < 0.9
    assert rows["ulysses"]["chosen"] == {name: value for name, value in chosen.items() if name in FP8}
    ran = CliRunner().invoke(app, ["verify", "--mask", "causal", *small])
    assert ran.exit_code == 0, ran.output
    results = json.loads(ran.stdout)["results"]
    assert {r["problem"]["dtype"] for r in results} == {"bfloat16"}
    assert all(r["ok"] for r in results)
