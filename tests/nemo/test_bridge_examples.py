"""The examples of examples/nemo, with their own command lines."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "nemo"
COMMAND = "--nproc 2 --small --steps 3 --context-parallel-size 2 --provider striped"


def _run(program: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program, *words.split()])
    with pytest.raises(SystemExit) as leave:
        runpy.run_path(str(FOLDER / program), run_name="__main__")
    assert leave.value.code == 0


def _losses(
    words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], program: str = "pretrain.py"
) -> list[float]:
    _run(program, words, monkeypatch)
    printed = re.findall(r"lm loss: (\S+)", capfd.readouterr().out)
    return [float(x) for x in dict.fromkeys(printed)]  # the output of both ends is shown


def test_pretrain(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    losses = _losses(COMMAND, monkeypatch, capfd)
    assert len(losses) == 3
    assert losses == pytest.approx(_losses("--nproc 1 --small --steps 3", monkeypatch, capfd), rel=1e-5)


def test_finetune(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    _run("finetune.py", "--make tiny", monkeypatch)
    small = "--small --model tiny --data tiny --lora 4 --steps 2"
    one, divided, packed = (
        _losses(f"{words} {small}", monkeypatch, capfd, "finetune.py")
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
