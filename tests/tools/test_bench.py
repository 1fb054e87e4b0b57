"""``cp-plugin bench``: cases and ideals, the correctness gate, peers, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from commands import cp_plugin
from faulty_rings import faulty

from cp_plugin import Options, Problem
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing import oracle
from cp_plugin.testing.clock import Both, Taken
from cp_plugin.testing.launch import run_ranks
from cp_plugin.testing.traffic import price
from cp_plugin.tools.bench import contestants, te_peer, torch_ring
from cp_plugin.tools.bench.cases import MASKS, mask_name, pairs, shortened, with_mask
from cp_plugin.tools.bench.cli import _bounds
from cp_plugin.tools.bench.contestants import Entry
from cp_plugin.tools.bench.report import Measured

_SHAPE = ("--seq-length", "512", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--rounds", "1")
_TWO = ("--ranks", "2", "--device", "cpu", *_SHAPE)
command = partial(cp_plugin, "bench")
_PROBLEM = Problem(size=4, heads=6, kv_heads=2, head_dim=8, seq_length=512, dtype=torch.float32)


def measured(*args: str, status: int = 0) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The JSON of a run on two ranks, and mask -> contestant -> what it says."""
    done = command(*_TWO, *args, "--json")
    assert done.exit_code == status, done.output
    whole = json.loads(done.stdout)
    return whole, {case["mask"]: {m["name"]: m for m in case["contestants"]} for case in whole["cases"]}


def every_mask(problem: Problem = _PROBLEM) -> list[Problem]:
    return [with_mask(name, problem, bounds=_bounds(None, problem.seq_length)) for name in MASKS]


@pytest.mark.parametrize("problem", every_mask(), ids=mask_name)
def test_visible_pairs_and_the_share_of_the_ideal(problem: Problem) -> None:
    """A part of the heads on the whole sequence, one at least, whatever they divide by."""
    assert pairs(problem) == (~oracle.hidden_keys(problem, slice(None), torch.device("cpu"))).sum()
    for heads, kv_heads, part, groups in ((8, 4, 2, 1), (6, 2, 1, 1), (24, 12, 6, 3), (2, 1, 1, 1)):
        made = contestants.share(replace(problem, heads=heads, kv_heads=kv_heads), None, torch.device("cpu"))
        out, dq, dk, _ = made.step()
        assert out.shape == dq.shape == (512, 1, part, 8) and dk.shape == (512, 1, groups, 8)
        assert made.factor * part == heads / 4


def test_a_shortened_case_keeps_its_mask() -> None:
    for problem in every_mask(replace(_PROBLEM, seq_length=4096)):
        short = shortened(problem, 128)
        assert mask_name(short) == mask_name(problem) and short.seq_length == 128 and 0 < pairs(short) <= 128 * 128
        assert not problem.bounds or len(short.bounds) > 2
        assert short.window == (None if problem.window is None else (16, 0))


def test_every_mask_is_right_and_timed_on_two_ranks() -> None:
    chosen = [f for name in ("ring", "attention2d", "usp", "torch-ring") for f in ("--provider", name)]
    whole, by_mask = measured(*chosen, "--cluster", "cpu")
    assert whole["ok"] and whole["rounds"] == 1 and set(by_mask) == set(MASKS)
    for case in whole["cases"]:
        packed, windowed = "document" in case["mask"], "window" in case["mask"]
        assert (len(case["bounds"]) > 2) == packed
        assert case["problem"]["causal"] == case["mask"].startswith("causal")
        assert bool(case["problem"]["window"]) == windowed
        for name, m in by_mask[case["mask"]].items():
            if name == "torch-ring" and (packed or windowed):
                assert "PyTorch's ring has no" in m["cannot"]
                continue
            assert m["correct"] and set(m["errors"]) == {"out", "dq", "dk", "dv"} == set(m["allowed"]), (case, name)
            assert 0 < max(m["errors"].values()) <= 1e-5
            assert 0 < m["median"]["forward"] < m["median"]["total"] == m["seconds"]["total"][0]
            assert m["of_ideal"]["total"] == m["ideal"]["total"][0] / m["seconds"]["total"][0]
            assert (m["predicted"] is None or m["sent"] is None) == (name == "torch-ring")
    problem = Problem(size=2, heads=4, kv_heads=2, head_dim=8, seq_length=512, dtype=torch.float32)
    row = price(["ring"], problem, Options())[0]
    assert by_mask["causal"]["ring"]["sent"] == {"least": row.least, "most": row.most}


def test_linear_attention() -> None:
    flags = ("--provider", "lasp2", "--decay", "key", "--mask", "causal-document", "--mask", "full")
    for case in measured(*flags)[1].values():
        m = case["lasp2"]
        assert m["correct"] and "dlog_decay" in m["errors"] and m["flops_per_s"] is None and m["of_ideal"]["total"] > 0


def test_half_precision_is_held_to_the_error_of_its_kernel() -> None:
    flags = ("--dtype", "bfloat16", "--provider", "striped", "--provider", "torch-ring", "--mask", "causal")
    for m in measured(*flags)[1]["causal"].values():
        assert 1e-4 < m["errors"]["out"] < m["allowed"]["out"] < 1e-2


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in ("block", "window", "raises"):
        monkeypatch.setitem(providers.registry(), f"faulty_{fault}", faulty(fault))


@pytest.mark.parametrize(("fault", "wrong"), [("block", {"causal", "causal-window"}), ("window", {"causal-window"})])
@pytest.mark.usefixtures("planted")
def test_a_wrong_method_is_not_timed(fault: str, wrong: set[str]) -> None:
    flags = ("--provider", f"faulty_{fault}", "--provider", "ring", "--mask", "causal", "--mask", "causal-window")
    whole, by_mask = measured(*flags, status=1)
    assert not whole["ok"]
    for mask, m in by_mask.items():
        assert m[f"faulty_{fault}"]["correct"] == (mask not in wrong) == ("seconds" in m[f"faulty_{fault}"])
        assert m["ring"]["correct"] and m["ring"]["median"]["total"] > 0


@pytest.mark.usefixtures("planted")
def test_the_table_names_what_is_wrong() -> None:
    done = command(*_TWO, "--provider", "faulty_block", "--provider", "ring", "--mask", "causal")
    assert done.exit_code == 1 and "WRONG:" in done.output
    assert done.output.splitlines()[-1] == "FAIL: 1 of 2 timed; 1 WRONG, not timed"


@pytest.mark.usefixtures("planted")
def test_a_method_that_fails_is_named() -> None:
    done = command(*_TWO, "--provider", "faulty_raises", "--mask", "causal")
    assert done.exit_code == 1 and "faulty_raises fails on causal: planted fault" in done.output


def test_a_peer_that_refuses_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **how: object) -> None:
        raise NotImplementedError("not on a Sunday")

    monkeypatch.setattr(torch_ring.upstream, "_templated_ring_attention", refuse)
    done = command(*_TWO, "--provider", "torch-ring", "--provider", "ring", "--mask", "causal")
    assert done.exit_code == 0 and "cannot: upstream refuses: not on a Sunday" in done.output
    assert "PASS: 1 of 2 timed; 1 cannot run, for the reasons given" in done.output


def test_ranks_that_were_started_by_others_join() -> None:
    """As under torchrun: every rank runs the command, and only the first prints."""
    flags = ("--device", "cpu", *_SHAPE, "--provider", "ring", "--mask", "causal", "--json")

    def rank() -> tuple[int, str]:
        done = command(*flags)
        return done.exit_code, done.output

    (first, output), (second, silence) = run_ranks(rank, 2)
    assert (first, second, silence) == (0, 0, "")
    assert json.loads(output)["cases"][0]["problem"]["size"] == 2


def test_missing_peers_are_left_out_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry.parse("te-a2a+p2p")
    monkeypatch.setattr(te_peer, "find_spec", lambda name: None)
    assert "pip install 'cp-plugin[te]'" in str(entry.missing("cuda"))
    monkeypatch.setattr(te_peer, "find_spec", lambda name: object())
    assert "CUDA devices only" in str(entry.missing("cpu")) and entry.missing("cuda") is None
    done = command(*_TWO, "--provider", "te-p2p", "--mask", "causal")
    assert done.exit_code == 1 and "cannot: Transformer Engine's attention runs on CUDA" in done.output


@pytest.mark.parametrize(
    ("changed", "possible"),
    [
        ({}, {"p2p", "all_gather", "a2a", "a2a+p2p"}),
        ({"window": (9, 0)}, {"all_gather", "a2a"}),
        ({"kv_heads": 1}, {"p2p", "all_gather"}),
        ({"documents": True}, set()),
        ({"dtype": torch.float32}, set()),
    ],
)
def test_support_matrix_of_transformer_engine(changed: dict[str, Any], possible: set[str]) -> None:
    problem = replace(Problem(size=8, heads=16, kv_heads=8, seq_length=4096), **changed)
    assert {c for c in te_peer.COMM_TYPES if te_peer.unsupported(c, problem) is None} == possible


def test_speeds_are_of_the_slowest_rank_and_of_the_visible_pairs() -> None:
    problem = with_mask("causal", replace(_PROBLEM, heads=2, kv_heads=2, seq_length=8))
    ranks = [[Both(1.0, 4.0), Both(2.0, 3.0), Both(1.0, 9.0)], [Both(3.0, 3.5), Both(1.0, 5.0), Both(1.0, 8.0)]]
    taken = Taken.from_rounds(ranks)
    assert (taken.forward, taken.total) == ([3.0, 2.0, 1.0], [4.0, 5.0, 9.0]) and taken.medians == Both(2.0, 5.0)
    one = Measured(
        entry=Entry(name="ring"),
        taken=taken,
        ideal=Taken.from_rounds(ranks, 0.5),
        errors={"out": 1.0},
        allowed={"out": 2.0},
    )
    assert not one.wrong and replace(one, errors={"out": float("inf")}).wrong
    forward = 2 * 36 * 2 * 16 / 4  # pairs, heads, both head sizes, ranks
    row = one.as_json(problem)
    assert row["of_ideal"] == {"forward": 0.5, "total": 0.5}
    assert row["flops_per_s"] == {"forward": forward / 2.0, "total": 3.5 * forward / 5.0}
