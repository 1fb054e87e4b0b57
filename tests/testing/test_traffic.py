"""Traffic: the methods' advantage in bytes, by formula and by trace, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from commands import cp_plugin

from cp_plugin import Options, Problem
from cp_plugin.engine.attention.calls import settled
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing.ranks import refuse_too_large
from cp_plugin.testing.traffic import Row, price_one, trace

PUBLISHED = Problem(size=64, heads=64, kv_heads=64, head_dim=128, seq_length=512, dtype=torch.float32)
TRACED = (0, 37)
"""Ranks that are traced too: on the diagonal of a square grid and off it."""


def priced(name: str, problem: Problem, **options: object) -> Row:
    """Traffic by the formula."""
    row = price_one(settled(providers.get(name), problem, Options(**options)))
    assert row.ranks, row.setup.reason
    return row


@pytest.mark.parametrize(
    ("name", "options", "published", "beside"),
    [
        ("ring", {}, 378, 0),
        ("attention2d", {"grid": (8, 8), "layout": "striped"}, 81, 7 * 3 / 128),  # lse, and lse and delta
        ("attention2d", {"grid": (8, 8)}, 81 - 4, 7 * 3 / 128),  # zigzag: k, v, dk and dv stay in their columns
        ("usp", {"head_parallel": 8}, 49, 0),
        ("attention2d", {"grid": (2, 4), "head_parallel": 8, "layout": "striped"}, 32, 3 * 3 / 128),
    ],
)
def test_published_counts_in_units_of_one_local_tensor(
    name: str, options: dict[str, object], published: int, beside: float
) -> None:
    """The published counts leave out row statistics; the trace confirms the formula."""
    row = priced(name, PUBLISHED, **options)
    for index in TRACED:
        assert trace(row.setup, index) == row.ranks[index], (row.setup, index)
    units = row.most / (row.setup.problem.q_elements * 4)
    assert units == published + beside
    assert units == pytest.approx(published, rel=0.05)


EVERY = {*providers.names(), *providers.names("linear")}
traffic = partial(cp_plugin, "traffic")


def test_the_command_shows_every_provider_or_its_reason() -> None:
    """In 100 columns, without an empty one, and a reason below the table once."""
    result = traffic()
    assert result.exit_code == 0, result.output
    lines, text = result.stdout.splitlines(), " ".join(result.stdout.split())
    assert all(len(line) <= 100 and "…" not in line for line in lines)
    assert {line.split()[0].rstrip(":") for line in lines} >= EVERY
    assert not any("note" in line for line in lines if line.startswith("provider "))
    assert text.count("ulysses: cannot: --ranks 64: 32 query and 8 key/value heads") == text.count("cannot:") == 1
    assert "grid 16x4," in text
    (ring,) = [line for line in lines if line.startswith("ring ")]
    assert ring.endswith("1.000x")


def test_json_has_the_bytes_of_the_formula() -> None:
    args = ("--provider", "ring", "--provider", "attention2d", "--grid", "8x8", "--kv-heads", "32", "--json")
    result = traffic(*args)
    report = json.loads(result.stdout)
    assert result.stderr == "" and report["problem"]["dtype"] == "bfloat16"
    problem = Problem(size=64, heads=32, kv_heads=32)
    for row, options in zip(report["rows"], (Options(), Options(grid=(8, 8))), strict=True):
        want = price_one(settled(providers.get(row["provider"]), problem, options))
        assert (row["most"], row["least"]) == (want.most, want.least)
        assert sum(n for axes in row["by_axis"].values() for n in axes.values()) == want.most
    assert report["rows"][1]["chosen"]["grid"] == [8, 8] and report["rows"][1]["over_ring"] < 0.25


def test_an_impossible_problem_is_a_failure() -> None:
    result = traffic("--provider", "ulysses", "--heads", "3", "--kv-heads", "1")
    assert result.exit_code == 1 and "cannot: --ranks 64" in result.stdout
    uneven = traffic("--seq-length", "100")
    assert uneven.exit_code == 1 and all(name in uneven.stdout for name in EVERY)
    short = traffic("--seq-length", "1")  # ranks without a token
    assert short.exit_code == 1 and all(name in short.stdout for name in EVERY)


@pytest.mark.parametrize("wrong", [1, -1])
def test_measuring_notices_a_wrong_formula(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = providers.get("ring")

    def traffic_off_by_one(problem: Problem, options: Options, index: int) -> dict[tuple[str, str], int]:
        sent = dict(ring.traffic(problem, options, index))
        sent["backward", "cp"] += wrong if index == 1 else 0
        return sent

    monkeypatch.setitem(providers.registry(), "ring", replace(ring, traffic=traffic_off_by_one))
    small = ("--measure", "--ranks", "2", "--heads", "2", "--kv-heads", "1", "--head-dim", "8")
    result = traffic("--provider", "ring", "--provider", "striped", *small)
    assert result.exit_code == 1
    assert "DIFFERS: rank 1, backward, axis cp" in result.stdout
    assert "FAIL: ledger = trace = formula in 1 of 2" in result.stdout


def test_too_large_problems_are_refused() -> None:
    assert refuse_too_large(Problem(size=4, heads=8, kv_heads=8, seq_length=128), 10) < 60
    with pytest.raises(ValueError, match=r"--ranks 64 --seq-length 1048576 --heads 8 .* of memory, but .* is free"):
        refuse_too_large(Problem(size=64, heads=8, kv_heads=8, seq_length=2**20), 1)
    with pytest.raises(ValueError, match=r"would take .* minutes or so"):
        refuse_too_large(Problem(size=2, heads=8, kv_heads=1, head_dim=16, seq_length=2**17), 1)
