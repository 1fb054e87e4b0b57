"""Examples: configurations, the flags that follow, the command, and comparing losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cp_plugin.cli.app import app
from cp_plugin.cli.examples import config
from cp_plugin.cli.examples.command import Changes, command
from cp_plugin.cli.examples.config import BASE, load
from cp_plugin.cli.examples.training import Iteration, disagreements, not_falling, read_log
from cp_plugin.core.options import Options

PLAIN = {"attention-dropout": 0, "hidden-dropout": 0, "position-embedding-type": "rope"}
GRID: dict[str, Any] = {
    "title": "a grid",
    "about": "what it shows",
    "paper": "attention2d",
    "cluster": {"profile": "dgx-a100", "nodes": 2, "per_node": 8},
    "model": {"num-layers": 4, "hidden-size": 64, "num-attention-heads": 16, "vocab-size": 257, **PLAIN},
    "parallel": {"context-parallel-size": 16, "cp-provider": "attention2d", "cp-grid": "4x4"},
    "training": {"bf16": True, "micro-batch-size": 1, "global-batch-size": 1, "lr": 0.1, "train-iters": 10},
    "lengths": [1024, 4096],
    "variants": {
        "fp8": {"parallel": {"cp-fp8": "comm"}, "lengths": [2048]},
        "1/4": {"training": {"bf16": False}, "cluster": {"nodes": 4}, "parallel": {"context-parallel-size": 32}},
    },
}
LINEAR = {"context-parallel-size": 16, "cp-linear-attention": "gla"}


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    """Writes GRID with changes to a folder; returns its path."""

    def make(**changes: Any) -> str:
        found = {name: value for name, value in {**GRID, **changes}.items() if value is not None}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(found, sort_keys=False))
        return str(tmp_path)

    return make


def test_an_example_in_a_folder(folder: Callable[..., str]) -> None:
    example = load(folder())
    assert example.variants == [BASE, "fp8", "1/4"]
    flags = command(example).flags
    assert " ".join(flags).endswith("--seq-length 1024 --max-position-embeddings 1024")
    assert "--bf16" in flags and flags[flags.index("--cp-grid") + 1] == "4x4"
    other = command(example, "1/4")
    assert "--bf16" not in other.flags and other.experiment.devices == 32
    assert command(example, "fp8").seq_length == 2048 and command(example, "FP8").experiment.variant == "fp8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lenghts": [1]}, "lenghts: unknown field: did you mean lengths"),
        ({"variants": {"x": {"modell": {}}}}, r"variants.x.modell: unknown field: did you mean model"),
        ({"training": {"num-layers": 2}}, "num-layers is in both model and training: write it once"),
        ({"training": {"--lr": 1}}, "--lr: write the flag without leading dashes"),
        ({"training": {"global_batch_size": 1}}, "global_batch_size: write the flag without leading dashes"),
        ({"cluster": {**GRID["cluster"], "nodes": 0}}, "cluster.nodes: .*greater than or equal to 1"),
        ({"lengths": []}, "lengths: .*at least 1"),
        ({"parallel": {"cp-provider": "ring"}}, "parallel: context-parallel-size is missing"),
        ({"model": {"num-layers": 2}}, "model: vocab-size is missing"),
        ({"variants": {"base": {}}}, "base stands for the example without a variant"),
        ({"title": None}, "title: Field required"),
        ({"lengths": [0]}, "lengths.0: .*greater than or equal to 1"),
        ({"lengths": [True]}, "lengths.0: .*valid integer"),
        ({"cluster": {**GRID["cluster"], "nodes": "2"}}, "cluster.nodes: .*valid integer"),
        ({"data": 0}, "data: .*valid dictionary"),
        ({"model": {"vocab-size": 9, "num-layers": -1}}, "model: num-layers -1: write a whole number, 1 or more"),
        ({"model": {"vocab-size": 9, "num-layers": False}}, "num-layers: there is no inherited value to remove"),
        ({"model": {"vocab-size": 9, "hidden-size": "8"}}, "model: hidden-size 8: write a whole number, 1 or more"),
        ({"training": {"lr": float("nan")}}, "training.lr.*finite number"),
    ],
)
def test_invalid_configurations(folder: Callable[..., str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder(**changes))


def test_no_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown example 'lasp2': did you mean lasp2-64xa100\?"):
        load("lasp2")
    with pytest.raises(ValueError, match=r"this folder has no config.yaml"):
        load(str(tmp_path))
    for text, message in (
        ("title: [", r"config.yaml is not valid YAML: .*line 1"),
        ("only words", "fields are missing: title"),
        ("title: a\ntitle: b", r"config.yaml is not valid YAML: duplicate key title"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown example ''"):
        load("")


def test_another_method(folder: Callable[..., str]) -> None:
    example = load(folder())
    ring = command(example, changes=Changes(provider="ring", options=Options(layout="zigzag", head_parallel=2)))
    ours = {flag: value for flag, value in ring.values.items() if flag.startswith("cp-")}
    assert ours == {"cp-provider": "ring", "cp-layout": "zigzag", "cp-head-parallel": 2}
    assert command(example, changes=Changes(options=Options(grid=(2, 8)))).value("cp-grid") == "2x8"
    linear = load(folder(parallel=LINEAR))
    assert command(linear, changes=Changes(provider="lasp1")).value("cp-linear-provider") == "lasp1"


def test_more_flags(folder: Callable[..., str]) -> None:
    more = ("--lr", "0.1", "--num-layers=8", "--context-parallel-size", "4", "--moe-layer-freq", "1", "0")
    found = command(load(folder()), changes=Changes(more=more))
    assert found.value("num-layers") == 8 and found.size("context-parallel-size") == 4
    assert found.flags.count("--num-layers") == 1
    assert found.value("lr") == "0.1" and found.value("moe-layer-freq") == [1, 0]
    assert command(load(folder()), changes=Changes(more=("--seq-length", "5000"))).seq_length == 5000


@pytest.mark.parametrize(
    ("parallel", "variant", "seq_length", "changes", "message"),
    [
        (None, "fp9", None, {}, r"unknown variant of .* 'fp9': did you mean fp8\?"),
        (None, None, 5000, {}, r"--seq-length 5000: .* has 1024, 4096 \(nearest: 4096\); pass any other"),
        (None, None, None, {"provider": "rink"}, r"--provider rink: did you mean ring"),
        (None, None, None, {"more": ("0.1",)}, r"0\.1: only Megatron's flags may follow --"),
        (
            LINEAR,
            None,
            None,
            {"provider": "ring"},
            "the layers have linear attention; use one of lasp2, linear_ring, zeco, lasp1",
        ),
        (LINEAR, None, None, {"options": Options(intra_size=2)}, "--intra-size has no effect: all layers have linear"),
    ],
)
def test_refusals(
    folder: Callable[..., str], parallel: Any, variant: Any, seq_length: Any, changes: Any, message: str
) -> None:
    example = load(folder(**({} if parallel is None else {"parallel": parallel})))
    with pytest.raises(ValueError, match=message):
        command(example, variant, seq_length, Changes(**changes))


def test_comparing_losses() -> None:
    one = [Iteration(loss=loss, milliseconds=1.0) for loss in (6.0, 5.0)]
    assert disagreements(one, one, 2) == [] and not_falling(one) == []
    assert disagreements(one, one[:1], 2) == ["2 and 1 iterations were logged, not 2"]
    nan = [one[0], replace(one[1], loss=math.nan)]
    assert "1 loss differs by more than 1e-05" in disagreements(one, nan, 2)[0]
    assert not_falling(one[:1] * 2) == ["the loss did not fall: 6.000 to 6.000"]
    line = "elapsed time per iteration (ms): 12.5 | lm loss: 5.25E+00 |\n"
    assert read_log(line * 2) == [Iteration(loss=5.25, milliseconds=12.5)] * 2


def invoke(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["example", *words])
    return found.exit_code, found.output


def test_the_list_and_one_of_it() -> None:
    status, text = invoke()
    assert status == 0 and all(name in text for name in config.names())
    for name in config.names():
        status, text = invoke(name)
        example = load(name)
        assert status == 0 and example.config.title in text and all(v in text for v in example.variants)
        assert f"Next: cp-plugin example {name}" in text and "--print sh" in text
        status, text = invoke(name, "--print", "flags")
        assert status == 0 and text.split() == command(example).flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--print", "sh"], "NAME is missing"),
        (["lasp2-64xa100", "--variant", "gla"], "--variant gla has no effect alone: add --print sh"),
        (["lasp3-64xa100"], "did you mean lasp2-64xa100"),
        (["lasp2-64xa100", "--print", "flags", "--seq-length", "3000"], "nearest: 2048"),
        (["lasp2-64xa100", "--print", "flags", "--grid", "8"], "write rows x columns"),
        (["attention2d-64xa100", "--print", "sh", "--provider", "auto"], "--provider auto: choose one of"),
    ],
)
def test_refusals_of_the_command(words: list[str], message: str) -> None:
    status, text = invoke(*words)
    assert status == 2 and message in text.replace("\n", " ")
