"""The quickstart and its siblings end to end: real Megatron, real text, CP 1 against CP 4; and their failures."""

from __future__ import annotations

import importlib.util
import io
import runpy
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from nightly import nightly, slow
from rich.console import Console
from warm import Forked, before_forking

from cp_plugin.cli.examples import training
from cp_plugin.megatron.cpu import mode as cpu

EXAMPLES = Path(__file__).parent.parent / "examples"


def _module(name: str) -> Any:
    """An example, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: the first example makes the corpus."""
    return tmp_path_factory.mktemp("quickstart") / "out"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Run an example as its command does, its trainings forked from here; return the exit status."""
    with cpu.cpu_mode():
        import megatron.training.training  # noqa: F401

        before_forking()

    def popen(command: list[str], **named: object) -> object:
        return (Forked if "cp_plugin.pretrain_gpt" in command else Popen)(command, **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(training, "train", partial(training.train, quiet=True))  # no thread that draws, before a fork
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(*words: object) -> object:
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
        return left.value.code

    return run


@slow
def test_it_passes_and_leaves_a_plot(out: Path) -> None:
    command = [sys.executable, EXAMPLES / "quickstart.py", "--iterations", "4", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS: striped on 4 ranks equals one rank: 4 losses within")
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    audit = (out / "cp4.log").read_text()
    assert "4 of 4 replaced" in audit and "loss CP 4" in done.stdout


@nightly
def test_placed_packs_train_as_on_one_rank(
    run: Callable[..., object], out: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("packed.py", "--iterations", "4", "--out", out / "packed") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PASS: packs placed on 4 ranks train as on one: 4 losses within"), last


def test_packs_with_other_losses_fail() -> None:
    packed = _module("packed")
    one = [training.Iteration(loss=loss, milliseconds=1.0) for loss in (6.0, 5.0)]

    def said(placed: list) -> str:
        console = Console(file=io.StringIO(), width=200)
        status = packed.verdict(console, one, {"placed": placed, "ring": one}, Namespace(iterations=2, ranks=4))
        text = console.file.getvalue()
        assert text.startswith("FAIL" if status else "PASS")
        return text

    assert "packs placed on 4 ranks train as on one" in said(one)
    assert "placed: 1 loss differs" in said([replace(one[0], loss=6.01), one[1]])


@slow
def test_a_provider_that_does_not_exist_fails_in_the_last_lines(run: Callable[..., object], out: Path) -> None:
    said = str(run("quickstart.py", "--provider", "stripped", "--iterations", "1", "--out", out))
    assert said.startswith("FAIL: training with 4 ranks")
    assert "--cp-provider stripped: did you mean striped? Choose one of" in said


def test_the_verdict_fails_on_every_kind_of_difference() -> None:
    quickstart = _module("quickstart")
    one = [training.Iteration(loss=loss, milliseconds=1.0) for loss in (6.0, 5.0, 4.0)]

    def verdict(one: list, many: list) -> str:
        console = Console(record=True, width=200)
        status = quickstart.verdict(console, one, many, Namespace(iterations=len(one), provider="ring", ranks=4))
        text = console.export_text().strip()
        assert text.startswith("FAIL: " if status else "PASS: ")
        return text

    assert verdict(one, one).startswith("PASS")
    off, nan = ([*one[:2], replace(one[2], loss=loss)] for loss in (4.0001, float("nan")))
    assert verdict(one, off) == "FAIL: 1 loss differs by more than 1e-05, the first by 2.5e-05"
    assert verdict(one, nan).startswith("FAIL")
    assert "were logged" in verdict(one, one[:2])
    flat = [replace(i, loss=6.0) for i in one]
    assert "did not fall" in verdict(flat, flat)


@nightly
def test_linear_hybrid_and_softmax_models_pass_and_leave_a_plot(
    run: Callable[..., object], out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("hybrid.py", "--iterations", "4", "--ranks", "2", "--out", out) == 0, capfd.readouterr()
    assert capfd.readouterr().out.splitlines()[-1].startswith("PASS: 3 models on 2 ranks equal one rank within")
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "3 linear, 1 softmax" in (out / "hybrid" / "cp2.log").read_text()
