"""``cp-plugin bench --decode``: the correctness gate, bytes against the formula, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from cp_plugin import Options, Problem
from cp_plugin.attention.setups import settled
from cp_plugin.cli.app import app
from cp_plugin.cli.bench.decode import DecodeResult, Measured
from cp_plugin.inference import shard, tree
from cp_plugin.methods import registry as providers

sys.path.insert(0, str(Path(__file__).parent.parent / "ci" / "cluster"))

import inference

_SHAPE = ("--device", "cpu", "--seq-length", "96", "--heads", "4", "--kv-heads", "2", "--head-dim", "8")
_SHAPE += ("--rounds", "1", "--provider", "attention2d")


def command(*args: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--decode", *args])


def test_three_ranks_are_right_and_timed_and_send_the_formula(tmp_path: Path) -> None:
    done = command("--ranks", "3", *_SHAPE, "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    assert "PASS: 2 of 2 timed, 2 sent the bytes of the formula" in done.output
    (length,) = json.loads((tmp_path / "a.json").read_text())["lengths"]
    assert [one["name"] for one in length["providers"]] == ["ring", "attention2d"]
    formula = [tree.bytes_sent(3, rank, 1, 1, 4, 8) for rank in range(3)]
    assert length["formula"] == formula and len(set(formula)) == 2
    for one in length["providers"]:
        assert one["sent"] == formula and one["correct"] and set(one["errors"]) == {"prefill", "decode"}
        assert 0 < max(one["errors"].values()) <= 1e-5 and one["over_floor"] == one["decode"][0] / length["floor"][0]


def test_a_wrong_decode_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = shard._hidden
    monkeypatch.setattr(shard, "_hidden", lambda held, positions, window: hidden(held, positions - 1, window))
    done = command("--ranks", "2", *_SHAPE)
    assert done.exit_code == 1 and "WRONG: decode" in done.output and "2 WRONG, not timed" in done.output


def test_bytes_that_differ_from_the_formula_are_a_failure() -> None:
    problem = Problem(size=2, heads=4, kv_heads=2, head_dim=8, seq_length=64, dtype=torch.float32)
    setup = settled(providers.get("ring"), problem, Options())
    times = {"prefill": [1.0], "decode": [3.0, 1.0, 2.0]}
    one = Measured(setup=setup, errors={"decode": 0.0}, allowed=1.0, sent=[144, 144], **times)
    result = DecodeResult(problem=problem, measured=[one], floor=[0.5, 1.0, 2.0])
    assert result.formula == (144, 144) and result.ok and result.over_floor(one) == 2.0
    for bad in (replace(one, sent=[144, 145]), replace(one, errors={"decode": float("nan")}), Measured(setup=setup)):
        assert not replace(result, measured=[bad]).ok


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--mask causal", "--mask causal has no effect with --decode"),
        ("--window 0", "--window 0 has no effect with --decode"),
        ("--cluster cpu", "--cluster cpu has no effect with --decode"),
        ("--decay key", "--decay key has no effect with --decode"),
        ("--provider torch-ring", "a peer cannot decode here"),
        ("--provider lasp2", "linear attention decodes without messages"),
        ("--provider ring --provider ring", "every provider once"),
        ("--provider attention2d:grid=3x3", "use one of 1x4, 2x2, 4x1"),
        ("--seq-length 13", "use a multiple of 8"),
    ],
)
def test_refusals(flags: str, part: str) -> None:
    done = command("--device", "cpu", "--timeout", "10", *flags.split())
    assert done.exit_code == 2 and done.output.startswith("error: ") and part in done.output, done.output


def test_the_target_of_the_cluster_scenario_is_within_reach() -> None:
    """By bytes alone, prefill would be faster than the target."""
    both = inference.setups(16, inference.PREFILL, "--seq")
    ring, grid = (
        sum(n for (phase, _), n in s.provider.traffic(s.problem, s.options, 0).items() if phase == "forward")
        for s in both
    )
    assert ring / grid > inference.FASTER
    with pytest.raises(ValueError, match="--seq 100 must be a multiple of 32"):
        inference.setups(16, replace(inference.PREFILL, seq=100), "--seq")


def test_the_cluster_scenario_refuses_a_machine_without_network_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    done = CliRunner().invoke(inference.app, ["--nodes", "2", "--seq", "64", "--context", "64"])
    assert done.exit_code == 2 and "error: a virtual cluster needs" in done.output
