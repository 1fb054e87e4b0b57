"""``cp-plugin verify``: its oracle, its coverage, and the faults it catches."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import product
from typing import get_args

import oracle as independent
import pytest
import torch
from commands import cp_plugin
from faulty_rings import faulty
from nightly import NIGHT, nightly

from cp_plugin import Options, Partial, Problem
from cp_plugin.engine.attention.calls import Inputs
from cp_plugin.engine.core.problem import Decay
from cp_plugin.engine.kernels import merge as merging
from cp_plugin.engine.methods import registry as providers
from cp_plugin.testing import oracle
from cp_plugin.testing.oracle import TENSORS, answer, make_case, relative_errors, tensors
from cp_plugin.testing.verify import plan, verify

command = partial(cp_plugin, "verify", "--device", "cpu")
SMALL = ("--head-dim", "16", "--batch", "1", "--ranks", "4")


def problem(size: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32, causal: bool = True) -> Problem:
    return Problem(size=size, heads=4, kv_heads=kv_heads, head_dim=16, seq_length=16 * size, dtype=dtype, causal=causal)


@pytest.mark.parametrize("elements", [oracle.ELEMENTS, 200], ids=["whole", "in chunks"])
@pytest.mark.parametrize("causal", [True, False])
def test_its_oracle_agrees_with_the_tests_own(causal: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "ELEMENTS", elements)
    case = independent.Case(seq_length=24, heads=6, kv_heads=2, causal=causal, head_dim=8, v_head_dim=4)
    alike = Problem(
        size=1, seq_length=24, heads=6, kv_heads=2, causal=causal, head_dim=8, v_head_dim=4, dtype=torch.float64
    )
    errors = relative_errors(answer(Inputs(*case.inputs()), alike), case.reference()[:4])
    assert max(errors.values()) < 1e-14


def test_nan_errors_are_infinite() -> None:
    want = make_case(problem()).want
    broken = (want[0].clone().fill_(torch.nan), want[1] * 1.5, want[2][:-1], want[3])
    assert relative_errors(broken, want) == {"out": torch.inf, "dq": 0.5, "dk": torch.inf, "dv": 0.0}


def test_the_default_plan_covers_every_provider_layout_and_problem() -> None:
    problems = [problem(kv_heads=g, causal=mask) for g in (4, 2) for mask in (True, False)]
    planned = plan((), problems, Options())
    covered = {(s.provider.name, s.layout, s.problem) for s in planned if s.reason is None}

    def supported(names: list[str], decays: tuple[Decay, ...], delta: bool = False) -> set[tuple[str, str, Problem]]:
        tried = [replace(p, decay=decay, delta=delta) for p in problems for decay in decays]
        cases = product(map(providers.get, names), tried)
        return {
            (provider.name, layout, p)
            for provider, p in cases
            for layout in provider.layouts
            if provider.unsupported(p, Options(layout=layout)) is None
        }

    linear, decays = providers.names("linear"), get_args(Decay)
    by_rule = [supported(linear, decays, delta) for delta in (False, True)]
    assert covered == supported(providers.names(), ("none",)).union(*by_rule) and all(by_rule)
    chosen = [setup.options.chosen for setup in planned]
    assert any(c.get("intra_size") == 2 and c.get("backward") == "q" for c in chosen)
    assert any(c.get("head_parallel") == 2 and "grid" in c for c in chosen)


@pytest.mark.parametrize("threads", [False, pytest.param(True, marks=nightly)])
def test_providers_pass_on_ranks_and_on_threads(threads: bool) -> None:
    """Threads are used on one CUDA device."""
    problems = [problem(kv_heads=4), problem(dtype=torch.bfloat16, causal=False)]
    planned = plan((), problems, Options())
    if not NIGHT:  # each provider once in each dtype
        planned = [*{(s.provider.name, s.problem.dtype): s for s in planned if s.reason is None}.values()]
    results = verify(planned, "cpu", threads=threads)
    assert len(results) == sum(setup.reason is None for setup in planned)
    assert {result.setup.provider.name for result in results} == set(providers.registry())
    why = {setup.reason for setup in planned} - {None}
    assert all("use lasp2" in reason for reason in why), why
    for result in results:
        assert result.ok, (result, str(result.setup))
        half = result.setup.problem.dtype == torch.bfloat16
        assert tuple(result.errors) == tensors(result.setup.problem) and (result.errors["out"] > 1e-4) == half


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_fault_in_a_third_partys_method_is_caught(dtype: torch.dtype, threads: bool) -> None:
    """One that raises stops no other."""
    first_wrong = {"block": "out", "lse": "dq", "nan": "dk"}
    planned = plan([*map(faulty, ("raises", *first_wrong)), "striped"], [problem(dtype=dtype)], Options())
    raised, *wrong_ones, good = verify(planned, "cpu", threads=threads)
    assert not raised.ok and "planted fault" in raised.failure
    for result, wrong in zip(wrong_ones, first_wrong.values(), strict=True):
        name = result.setup.provider.name
        assert not result.ok and not result.failure and result.errors[wrong] > result.limits[wrong], name
        assert result.worst == wrong or name != "faulty_nan"
        before = TENSORS[: TENSORS.index(wrong)]
        assert all(result.errors[tensor] <= result.limits[tensor] for tensor in before), name
    assert good.ok


def test_the_command_passes_in_plain_lines_and_in_json() -> None:
    result = command(*SMALL, "--provider", "ring", "--provider", "usp", "--heads", "4", "--mask", "causal")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.endswith("PASS") for line in lines) == (3 + 4) * 4 and "FAIL" not in result.stdout
    assert lines[-1] == "PASS: 28 of 28 within limits"
    result = command(
        *SMALL, "--provider", "attention2d", "--grid", "2x2", "--mask", "full", "--kv-heads", "8", "--json"
    )
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"] and len(report["results"]) == 4 * 2
    assert all(r["chosen"]["grid"] == [2, 2] and tuple(r["errors"]) == TENSORS[:4] for r in report["results"])


def test_a_forgotten_merge_weight_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def unweighted(total: Partial | None, new: Partial | None) -> Partial | None:
        if total is None or new is None:
            return total or new
        return Partial((total.out + new.out) / 2, torch.logaddexp(total.lse, new.lse))

    monkeypatch.setattr(merging, "merge", unweighted)
    args = (*SMALL, "--provider", "striped", "--provider", "all_gather", "--layout", "striped", "--kv-heads", "8")
    result = command(*args, "--mask", "full", "--dtype", "float32")
    assert result.exit_code == 1
    striped, gathered, last = result.stdout.splitlines()[2:]
    assert striped.endswith("FAIL") and gathered.endswith("PASS")
    assert last == "FAIL: 1 of 2 within limits"


def test_impossible_setups_are_listed_but_not_counted() -> None:
    args = (*SMALL, "--provider", "ulysses", "--layout", "zigzag", "--heads", "6")
    args += ("--mask", "causal", "--dtype", "float32")
    nothing = command(*args)
    assert nothing.exit_code == 1 and nothing.stdout.count("cannot: --ranks 4: 6 query and") == 2
    assert nothing.stdout.splitlines()[-1] == "FAIL: 0 of 0 within limits; 2 cannot run, for the reasons given"
    some = command(*args, "--provider", "ring")
    assert some.exit_code == 0
    assert some.stdout.splitlines()[-1] == "PASS: 2 of 2 within limits; 2 cannot run, for the reasons given"
