"""The examples of examples/nemo, with their own command lines."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "nemo"
Run = Callable[[str], list[float]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command line of an example in an empty folder; return its losses."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> list[float]:
        monkeypatch.setattr(sys, "argv", line.split())
        with pytest.raises(SystemExit) as leave:
            runpy.run_path(str(FOLDER / sys.argv[0]), run_name="__main__")
        assert leave.value.code == 0
        printed = re.findall(r"lm loss: (\S+)", capfd.readouterr().out)
        return [float(x) for x in dict.fromkeys(printed)]  # the output of both ends is shown

    return call


def test_pretrain(run: Run) -> None:
    losses = run("pretrain.py --nproc 2 --small --steps 3 --context-parallel-size 2 --provider striped")
    assert len(losses) == 3
    assert losses == pytest.approx(run("pretrain.py --nproc 1 --small --steps 3"), rel=1e-5)


def test_finetune(run: Run) -> None:
    run("finetune.py --make tiny")
    small = "--small --model tiny --data tiny --lora 4 --steps 2"
    one, divided, packed = (
        run(f"finetune.py {words} {small}")
        for words in (
            "--nproc 1",
            "--nproc 2 --context-parallel-size 2 --provider striped",
            "--nproc 2 --context-parallel-size 2 --provider auto --packed",
        )
    )
    assert len(one) == len(packed) == 2
    assert divided == pytest.approx(one, rel=1e-5)


def test_recipe_without_nemo_run() -> None:
    """With `nemo_run` hidden, as where it is not installed."""
    hide = "import sys, runpy; sys.modules['nemo_run'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", hide, FOLDER / "recipe.py"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "error: this needs NeMo-Run: pip install nemo_run\n"
