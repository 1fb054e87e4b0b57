"""``python -m cp_plugin.run``: run a script as ``__main__`` with the plugin active."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from warm import Forked, run_forked

from cp_plugin import run

SCRIPT = """
import os
import sys

import helper
from megatron.training import arguments

from cp_plugin.megatron.patches import patching

print("name", __name__)
print("argv", sys.argv)
print("path", sys.path[0] == os.path.dirname(os.path.abspath(__file__)) == os.path.dirname(helper.__file__))
print("active", "megatron.training.arguments:validate_args" in patching.installed())
print("rank", os.environ.get("RANK"))
if "--fail" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize("ranks", [[], ["--nproc", "2"]], ids=["one process", "forked ranks"])
def test_a_script_and_its_exit_status(script: Path, ranks: list[str]) -> None:
    """Test_early starts processes."""
    words = [str(script), "--cp-device", "cpu", "--flag", "a b", "--fail"]
    done = run_forked(lambda: run.main([*ranks, *words]))
    assert done.returncode == 7, done.stderr
    said = done.stdout.splitlines()
    assert {"name __main__", f"argv {words}", "path True", "active True", f"rank {0 if ranks else None}"} <= {*said}
    assert ("sys.exit(7)" in done.stderr) == bool(ranks)


@pytest.mark.usefixtures("adapter")
def test_an_interrupt_ends_all_ranks_and_loses_no_output(tmp_path: Path) -> None:
    path = tmp_path / "wait.py"
    path.write_text("import time\n\nprint('waits')\ntime.sleep(60)\n")
    words = ["--nproc", "2", str(path), "--cp-device", "cpu"]
    with Forked([sys.executable, "-m", "cp_plugin.run", *words]) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
        time.sleep(0.5)  # an interrupt in the middle of a fork is lost
        os.kill(process.pid, signal.SIGINT)
        said = process.stdout.read()
    assert process.returncode == 130 and "interrupted; 2 ranks stopped" in said


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "context parallelism (cp_plugin)" in text
    assert "--cp-provider" in text
    assert run.main([]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "2"], "no script given"),
        (["--cp-provider", "ring", "x.py"], "--cp-provider: only --nproc may precede the script"),
        (["no_such_script.py"], "no_such_script.py: no such script"),
        (["pretrain_gpt.py"], "no such script; without a Megatron-LM checkout, use -m cp_plugin.pretrain_gpt instead"),
    ],
)
def test_bad_command_lines(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run.main(words)


@pytest.mark.parametrize("text", [b"# A heading\nand prose\n", b"\x7fELF\x00\x01", b"x = '\xff'\n"])
def test_a_file_that_is_no_python(text: bytes, tmp_path: Path) -> None:
    """Named at once, before Megatron is imported, instead of a traceback after it."""
    path = tmp_path / "file"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="file: not a Python script"):
        run.main([str(path), "--cp-provider", "ring"])
