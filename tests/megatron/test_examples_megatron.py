"""Examples in Megatron: parsing, process groups on all ranks, and real steps with narrow layers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nightly import nightly, one_case, slow
from typer.testing import CliRunner
from warm import Forked, before_forking

from cp_plugin.cli.app import app
from cp_plugin.cli.examples import config, training
from cp_plugin.cli.examples.command import Changes, command
from cp_plugin.cli.examples.config import load
from cp_plugin.cli.examples.dry_run import dry_run, parsed, predict
from cp_plugin.cli.examples.scaled import run, scaled
from cp_plugin.cli.examples.sizes import options_of
from cp_plugin.megatron.cpu import mode as cpu

NAMES = config.names()
VARIANTS = [(name, variant) for name in NAMES for variant in load(name).variants]
FEW, STEPS = 4, 2


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    """Import Megatron once for all forked processes."""
    with cpu.cpu_mode():
        import megatron.training.initialize
        import megatron.training.training  # noqa: F401

        before_forking()
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    training.corpus(folder / "stdlib", 400_000, quiet=True)
    return folder


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, corpus: Path) -> Path:
    """Fork trainings from here; return the folder of the corpus."""
    flags = json.loads((corpus / "stdlib_text_document.json").read_text())["flags"]
    monkeypatch.setattr(training.subprocess, "Popen", Forked)
    monkeypatch.setattr("cp_plugin.cli.examples.scaled.corpus", lambda *_, **__: flags)
    return corpus


@one_case
@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_megatron_accepts_every_variant(name: str, variant: str) -> None:
    """And the planner prices it."""
    of = command(load(name), variant)
    found = parsed(of)
    assert found.parallel.devices == of.devices and found.parallel.seq_length == of.seq_length
    if not of.value("cp-linear-attention"):  # which may change the layout
        assert found.settings.options == options_of(of), "as the sizes that fit are found"
    prediction = predict(found, of.experiment.cluster.profile, of.per_node)
    assert prediction.priced.iteration.seconds > 0 and sum(prediction.sent.values()) > 0


WHOLE = [pytest.param(name, Changes(), marks=nightly if command(load(name)).devices > 8 else ()) for name in NAMES]
SMALL = [(name, Changes(nodes=2, per_node=4)) for name in NAMES]


@one_case
@pytest.mark.parametrize(
    ("name", "changes"), SMALL + WHOLE, ids=lambda x: x if isinstance(x, str) else "2x4" if x.nodes else "whole"
)
def test_the_dry_run(name: str, changes: Changes) -> None:
    """Process groups of all ranks: on two nodes of four GPUs, and as published."""
    of = command(load(name), changes=changes)
    found = dry_run(of)
    assert found.faults == [] and (found.ok or changes.nodes), "8 GPUs may have too little memory"
    by_name = {group.name: group for group in found.groups}
    assert by_name["cp"].size == of.size("context-parallel-size")
    own = [group for group in found.groups if group.exchanged]
    assert own or of.value("cp-linear-attention"), "ranks have exchanged messages in the plugin's groups"


def test_a_dry_run_of_a_hybrid_and_of_megatrons_own_method() -> None:
    lasp = load("lasp2-64xa100")
    patterns = {name: str(lasp.experiment(name).flags.get("cp-layer-pattern", "L")) for name in lasp.variants}
    hybrid = next(name for name, pattern in patterns.items() if "N" in pattern)
    found = dry_run(command(lasp, hybrid, changes=Changes(nodes=1)))
    assert found.faults == [] and {"linear cp", "cp"} <= {axis for _, axis, _ in found.prediction.sent}
    own = dry_run(command(load("striped-8xa100"), changes=Changes(provider="upstream")))
    assert own.faults == [] and not any(group.exchanged for group in own.groups)


def test_bytes_are_the_ledger_of_a_call_times_layers() -> None:
    """ATTENTION2D, 760M: the closed formula of one call, 24 layers."""
    of = command(load("attention2d-64xa100"))
    found = predict(parsed(of), of.experiment.cluster.profile, of.per_node)
    setup = found.priced.main.setup
    call = setup.provider.traffic(setup.problem, setup.options, 0)
    assert sum(found.sent.values()) == pytest.approx(24 * sum(call.values()), rel=1e-9)


def test_wrong_groups_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of an axis that have swapped a member: nothing else notices, and every rank gets an answer."""
    from cp_plugin.megatron.layers import groups

    original = groups.axis_groups

    def swapped(*args: Any) -> dict[str, list[list[int]]]:
        found = original(*args)
        first, second, *_ = found["q"]
        first[-1], second[-1] = second[-1], first[-1]
        return found

    monkeypatch.setattr(groups, "axis_groups", swapped)
    found = dry_run(command(load("attention2d-64xa100"), changes=Changes(nodes=1)))
    assert not found.ok and any(fault.startswith("q: rank ") for fault in found.faults), found.faults


def test_dry_runs_that_fail() -> None:
    words = ["example", "attention2d-64xa100", "--dry-run", "--json", "--nodes", "1", "--", "--seq-length", "4194304"]
    large = CliRunner().invoke(app, words)
    found = json.loads(large.stdout)
    assert large.exit_code == 1 and not found["memory"]["fits"] and found["faults"] == []
    refused = CliRunner().invoke(app, ["example", "striped-8xa100", "--dry-run", "--", "--num-layerz", "3"])
    assert refused.exit_code == 2 and "did you mean --num-layers" in refused.output.replace("\n", " ")


@slow
@one_case
@pytest.mark.parametrize("name", NAMES)
def test_a_scaled_run(name: str, forked: Path, tmp_path: Path) -> None:
    """Within 1e-5 of CP 1, the first step within 1e-6."""
    of = scaled(command(load(name)), FEW)
    found = run(of, STEPS, tmp_path, quiet=True)
    assert found.problems == [] and len(found.many) == STEPS


def test_a_scaled_run_in_fp8(forked: Path, tmp_path: Path) -> None:
    of = scaled(command(load("attention2d-64xh100"), "fp8"), FEW)
    assert "--cp-fp8" in of.many.flags and "fp8-format" in of.changed
    found = run(of, STEPS, tmp_path, quiet=True)
    assert found.problems == [] and [i.loss for i in found.one] != [i.loss for i in found.many]


def test_a_scaled_run_that_differs(forked: Path, tmp_path: Path) -> None:
    """The run with CP 1 has other weights: every loss differs."""
    of = scaled(command(load("attention2d-64xa100")), FEW)
    of = replace(of, one=replace(of.one, values={**of.one.values, "seed": 4321}))
    problems = " ".join(run(of, STEPS, tmp_path, quiet=True).problems)
    assert "2 losses differ by more than 1e-05" in problems and "the first losses differ" in problems


def test_a_training_that_fails(forked: Path, tmp_path: Path) -> None:
    of = scaled(command(load("attention2d-64xa100"), changes=Changes(more=("--num-layerz", "2"))), FEW)
    with pytest.raises(training.TrainingError, match="training with 4 ranks ended with status 2"):
        run(of, STEPS, tmp_path, quiet=True)
    assert "--num-layerz: no such flag; did you mean --num-layers?" in next(tmp_path.rglob("ranks4.log")).read_text()
