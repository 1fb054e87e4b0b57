"""The quickstart and its siblings end to end: real Megatron, real text, CP 1 against CP 4; and their failures."""

from __future__ import annotations

import math
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import Popen

import pytest
import runs
from nightly import nightly
from runs import Iteration
from warm import Forked, cpu_mode, warm_up

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: the first example makes the corpus."""
    return tmp_path_factory.mktemp("quickstart") / "out"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Run an example as its command does, its training runs forked from here; return the exit status."""
    with cpu_mode():
        import megatron.training.training  # noqa: F401

        warm_up()

    def popen(command: list[str], **named: object) -> object:
        return (Forked if "cp_plugin.pretrain_gpt" in command else Popen)(command, **named)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(runs, "train", partial(runs.train, quiet=True))  # no thread that draws, before a fork

    def run(*words: object) -> object:
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
        return left.value.code

    return run


@nightly
def test_it_passes_and_leaves_a_plot(output: Path) -> None:
    command = [sys.executable, EXAMPLES / "quickstart.py", "--iterations", "4", "--out", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASS: striped on 4 ranks equals one rank: 4 losses within")
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")
    audit = (output / "cp4.log").read_text()
    assert "4 of 4 replaced" in audit and "loss CP 4" in done.stdout


@nightly
def test_placed_packs_train_as_on_one_rank(
    run: Callable[..., object], output: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("packed.py", "--iterations", "4", "--out", output / "packed") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PASS: packs placed on 4 ranks train as on one: 4 losses within"), last


@nightly
def test_a_provider_that_does_not_exist_fails_in_the_last_lines(run: Callable[..., object], output: Path) -> None:
    said = str(run("quickstart.py", "--provider", "stripped", "--iterations", "1", "--out", output))
    assert said.startswith("FAIL: training with 4 ranks")
    assert "--cp-provider stripped: did you mean striped? Choose one of" in said


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((6.0, 5.0, 4.0), "PASS: striped equals one within 0.0e+00 (allowed 1e-05)"),
        ((6.0, 5.0, 4.0001), "FAIL: striped: 1 loss differs by more than 1e-05, the first by 2.5e-05"),
        ((6.0, math.nan, math.nan), "FAIL: striped: 2 losses differ by more than 1e-05"),
        ((6.0, 5.0), "FAIL: striped: 3 and 2 iterations were logged, not 3"),
        ((), "FAIL: striped: 3 and 0 iterations were logged, not 3"),
    ],
)
def test_the_verdict_fails_on_every_kind_of_difference(
    losses: tuple[float, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one, many = ([Iteration(loss, 1.0) for loss in run] for run in ((6.0, 5.0, 4.0), losses))
    status = runs.verdict({"striped": (one, many)}, 3, "striped equals one")
    assert capsys.readouterr().out.startswith(said) and status == said.startswith("FAIL")


def test_losses_are_read_and_must_fall(capsys: pytest.CaptureFixture[str]) -> None:
    flat = runs.read_log("elapsed time per iteration (ms): 12.5 | lm loss: 5.25E+00 |\n" * 2)
    assert flat == [Iteration(5.25, 12.5)] * 2
    assert runs.verdict({"ring": (flat, flat)}, 2, "") == 1
    assert "FAIL: ring: the loss did not fall: 5.250 to 5.250" in capsys.readouterr().out


@nightly
def test_linear_hybrid_and_softmax_models_pass_and_leave_a_plot(
    run: Callable[..., object], output: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("hybrid.py", "--iterations", "4", "--ranks", "2", "--out", output) == 0, capfd.readouterr()
    assert capfd.readouterr().out.splitlines()[-1].startswith("PASS: 3 models on 2 ranks equal one rank within")
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "3 linear, 1 softmax" in (output / "hybrid" / "cp2.log").read_text()
