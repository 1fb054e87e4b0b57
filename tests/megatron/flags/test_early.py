"""What the plugin's flags alone tell is refused before Megatron is imported, by a message and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_bad_flags import CASES as BAD

from cp_plugin.engine.common import refusals
from cp_plugin.engine.methods import registry
from cp_plugin.megatron.flags import early

LATER = 30
"""Of the refused command lines, those that take more to know: the provider, the model, the device, the planner."""
START = """
import json, os, runpy, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
fork, os.fork = os.fork, None
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as left:
    print(json.dumps([left.code, "megatron" in sys.modules]))
"""
STARTS = {
    "run": ("cp_plugin.run", "SCRIPT"),
    "run --nproc": ("cp_plugin.run", "--nproc", "2", "SCRIPT"),
    "pretrain_gpt": ("cp_plugin.pretrain_gpt",),
    "pretrain_gpt --nproc": ("cp_plugin.pretrain_gpt", "--nproc", "2"),
}


def _ours_alone(flags: str) -> bool:
    """Whether a command line has flags of the plugin only, besides the number of ranks and a YAML file."""
    rest = re.sub(r"--(context-parallel-size|yaml-cfg) \S+", "", flags)
    return all(word.startswith("--cp-") for word in rest.split() if word.startswith("--"))


def test_all_that_the_flags_tell_by_themselves() -> None:
    said = {}
    cases = [flags for flags in BAD if _ours_alone(flags)]
    for flags in cases:
        try:
            early.check(flags.split())
        except ValueError as error:
            said[flags] = str(error)
    late = [flags for flags in cases if flags not in said]
    assert len(late) == LATER, late
    assert len(said) > 40
    for flags, message in said.items():
        assert re.search(BAD[flags], message), flags


@pytest.mark.parametrize(
    "flags", ["", "--help", "--cp-comm-type p2p", "--cp-of-a-fork 3", "--cp-provider ring --context-parallel-size 2"]
)
def test_everything_else_is_left_to_megatron(flags: str) -> None:
    early.check([*flags.split(), "--no-such-flag", "x"])


def _refused(start: str, folder: Path, *flags: str, **environment: str) -> str:
    """What is said in place of a start."""
    script = folder / "train.py"
    script.write_text("raise AssertionError('started')")
    words = [str(script) if word == "SCRIPT" else word for word in STARTS[start]]
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", START, *words, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=own | environment)
    assert json.loads(done.stdout) == [refusals.STATUS, False]
    return done.stderr.replace(str(script), "SCRIPT")


@pytest.mark.parametrize("start", STARTS)
def test_every_way_to_start(start: str, tmp_path: Path) -> None:
    said = _refused(start, tmp_path, "--cp-provider", "rnig")
    assert re.fullmatch(r"cp_plugin: --cp-provider rnig: did you mean ring\? Choose one of .*\n", said)


@pytest.mark.parametrize(
    ("start", "environment", "command"),
    [
        ("run", {}, "python -m cp_plugin.run --nproc 8 SCRIPT ..., or torchrun --nproc-per-node 8 without --nproc"),
        ("run", {"WORLD_SIZE": "12"}, "python -m cp_plugin.run --nproc 8 SCRIPT"),
        ("pretrain_gpt --nproc", {}, "python -m cp_plugin.pretrain_gpt --nproc 8 ..., or torchrun"),
    ],
)
def test_a_wrong_number_of_ranks(start: str, environment: dict[str, str], command: str, tmp_path: Path) -> None:
    said = _refused(start, tmp_path, "--context-parallel-size", "4", "--tensor-model-parallel-size", "2", **environment)
    assert "--tensor-model-parallel-size 2 x --context-parallel-size 4 = 8 needs" in said and command in said


def test_one_rank_of_a_node_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []
    monkeypatch.setattr("cp_plugin.engine.common.refusals.time.sleep", waits.append)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    refusals.say("alone")
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    refusals.say("first of the second node")
    assert waits == []
    monkeypatch.setenv("LOCAL_RANK", "1")
    refusals.say("still alive after all")
    assert waits == [refusals._PATIENCE_S]
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_only_what_the_package_raises_itself_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def caught(call: object) -> BaseException:
        with pytest.raises(ValueError) as raised:
            call()  # type: ignore[operator]
        return raised.value

    refused = caught(lambda: registry.get("rnig"))
    assert refusals.message_of(refused) == str(refused)
    refused.add_note("on rank 1")
    assert refusals.message_of(refused) == f"{refused}\non rank 1"
    assert refusals.message_of(caught(lambda: int("x"))) is None, "raised elsewhere"
    monkeypatch.setenv("WORLD_SIZE", "x")
    assert refusals.message_of(caught(lambda: early.started_ranks(["a"]))) is None, "raised by int() in the package"
    assert refusals.message_of(KeyError("x")) is None
