"""What a command refuses is one line that names the flag, and exit status 2."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from commands import cp_plugin
from nightly import one_case

from cp_plugin.engine.common.text import wrap_for_terminal

QUERY = "--model llama3-8b --cluster dgx-h100"
SMALL = "--heads 4 --head-dim 8 --seq-length 32"
WRONG = {
    "traffic": [
        ("--provider rign", "--provider rign: did you mean ring? Choose one of "),
        ("--provider ring --grid 8x8", "--grid 8x8 has no effect with --provider ring: leave it out, or use"),
        ("--grid 8by8", "--grid 8by8: write rows x columns, such as 8x8"),
        ("--grid ٢x٢", "--grid ٢x٢: write rows x columns, such as 8x8"),
        ("--heads 12", "error: --heads 12 --kv-heads 8: "),
        ("--measure --seq-length 4194304", "use a smaller --seq-length"),
        ("--provider ring --decay token", "--decay token is for linear attention: leave it out, or use"),
    ],
    "verify --device cpu": [
        ("--provider rign", "--provider rign: did you mean ring?"),
        ("--provider striped --layout zigzag", "use --layout striped"),
        ("--seq-length 1048576", "use a smaller --seq-length"),
    ],
    "plan": [
        ("--model llama3-8b", "--cluster is missing"),
        ("--model llama3-405b --cluster dgx-h100 --seq-length 4194304", "nothing fits"),
        ("--cluster dgx-h100 --tensor 2 -- --num-layers 2", "--tensor 2 conflicts with Mega"),
        ("--model llama3-8b --cluster nowhere.toml", "error: --cluster nowhere.toml cannot be read"),
        ("--model llama3-8b --cluster dgx-h100 --documents /", "--documents /: a folder."),
        ("--model llama3-8b --cluster FILE", "a profile is a .toml file"),
        ("--reproduce lasp3", "error: --reproduce lasp3: did you mean lasp2? Choose one of"),
    ],
    f"plan {QUERY}": [
        ("--devices 12", "such as --devices 16"),
        ("--seq-length 1000001", "--seq-length 1000001"),
        ("-- --num-layers 2", "give only one of the two"),
        (
            "--devices 16 --global-batch 3 --context 1 --tensor 8 --pipeline 1",
            "--global-batch 3 must be a multiple of the data-parallel ranks, 2",
        ),
        ("--memory nan", "--memory nan: write GB per device"),
        ("--provider x", "--provider x has no effect without"),
    ],
    f"plan {QUERY} --explain --seq-length 65536": [
        ("--provider attention2d --grid 3x2", "--grid 3x2 does not hold 8 context-parallel ranks"),
        ("--layout zigzag", "--layout: a method's options need --provider"),
        ("--provider ring --context 3", "--context 3 does not divide the number of devices"),
        ("--provider ulysses --devices 64", "--context 64: 32 query and"),
    ],
    "example": [
        ("--print sh", "NAME is missing"),
        ("lasp2-64xa100 --variant gla", "--variant gla has no effect without --print sh"),
        ("lasp3-64xa100", "did you mean lasp2-64xa100"),
        ("lasp2-64xa100 --print flags --seq-length 3000", "nearest: 2048"),
        ("lasp2-64xa100 --print flags --variant gal", "--variant gal: did you mean gla"),
    ],
    "bench --device cpu --timeout 10": [
        ("--mask causl", "--mask causl: did you mean causal"),
        ("--provider te-p2", "--provider te-p2: did you mean te-p2p"),
        (
            "--provider ring:colour=red",
            "ring:colour=red: 'colour=red' is not option=value; options of ring are layout, backend",
        ),
        ("--provider burst:backward=left", "--provider burst:backward=left: --backward left: write kv, q, or auto"),
        ("--provider ring --provider ring", "name every contestant only once"),
        (
            "--provider ring --provider lasp2",
            "bench softmax and linear attention separately, not together: ring, lasp2",
        ),
        ("--provider ring --decay key", "--decay key is for linear attention"),
        (
            "--seq-length 8388608",
            "--seq-length 8388608 --heads 8 --head-dim 64 --batch 1: this needs up to 413 GB of memory, but",
        ),
        ("--documents chat --mask causal", "--documents chat has no effect with --mask causal"),
        ("--cluster dgx-h100 --dtype float64", "no attention rate for float64"),
    ],
    "dataset": [
        ("FILE", f"write cp-plugin dataset test_command_errors {__file__}"),
        ("missing.jsonl", "missing.jsonl: the first argument is the prefix of the files to write"),
    ],
    f"verify --decode --device cpu {SMALL}": [
        ("--mask full", "--mask full has no effect with --decode"),
        ("--fp8 compute", "use --fp8 comm"),
        ("--provider rign", "--provider rign: did you mean ring?"),
        ("--seq-length 1048576", "use a smaller --seq-length"),
    ],
}
"""Command -> its arguments (FILE: this file), and what their refusal says."""


@pytest.mark.parametrize(
    ("command", "args", "message"), [(command, *row) for command, rows in WRONG.items() for row in rows]
)
def test_errors_are_one_line_and_exit_status_2(command: str, args: str, message: str) -> None:
    result = cp_plugin(*(__file__ if word == "FILE" else word for word in f"{command} {args}".split()))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1


def test_reasons_of_rows_name_the_flags_of_the_command() -> None:
    """Not Megatron's: ``--bf16`` is none of these commands'."""
    for command in (["traffic"], ["verify", "--device", "cpu"]):
        odd = cp_plugin(*command, "--provider", "ring", "--seq-length", "7")
        assert "ring: cannot: --seq-length 7 cannot be split" in odd.stdout
        wide = cp_plugin(*command, "--provider", "ring", "--fp8", "comm", "--dtype", "float32")
        assert "use --dtype bfloat16" in " ".join(wide.stdout.split())


def test_a_message_is_wrapped_for_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between words; a flag, a path or a list without spaces stays whole, and files and pipes get one line."""
    monkeypatch.setenv("COLUMNS", "40")
    text = f"error: --documents {'600,' * 20}1: no such file. Give a file, or some lengths\nand a second line"
    stream = io.StringIO()
    assert wrap_for_terminal(text, stream) == text
    stream.isatty = lambda: True  # type: ignore[method-assign]
    lines = wrap_for_terminal(text, stream).split("\n")
    assert [line for line in lines if len(line) > 40] == [f"{'600,' * 20}1:"]
    assert " ".join(lines).split() == text.split() and lines[-1] == "and a second line"


@one_case
@pytest.mark.parametrize("words", ["traffic --json", "--version", "-h", "traffic --provider ring", "example"])
def test_a_full_disk_is_one_line(words: str) -> None:
    with open("/dev/full", "w") as full:
        run = [sys.executable, "-m", "cp_plugin.tools", *words.split()]
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")
