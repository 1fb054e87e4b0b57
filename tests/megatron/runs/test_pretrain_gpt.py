"""The plugin's pretraining script: from the command line, on a real dataset, and its refusals."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from training import DATA, MODEL, SGD
from warm import run_forked

from cp_plugin.engine.common import refusals
from cp_plugin.megatron.dataset import build

pytestmark = pytest.mark.usefixtures("adapter")

Train = Callable[[str], subprocess.CompletedProcess[str]]
ONE_STEP = f"{MODEL} {DATA} {SGD} --train-iters 1"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """``train(flags)``: the command, in a fork of this process."""
    from cp_plugin import pretrain_gpt

    def run(flags: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt", *flags.split()])
        return run_forked(lambda: refusals.exit_status(pretrain_gpt.main))

    return run


def test_it_trains_on_a_real_dataset_with_forked_ranks(tmp_path: Path, train: Train) -> None:
    flags = " ".join(build(tmp_path / "text", max_bytes=300_000).flags)
    common = f"{MODEL} {SGD.replace('--lr 0.05', '--lr 1')} --train-iters 8 --split 100,0,0"
    run = train(f"--nproc 2 {common} --data-cache-path {tmp_path}/cache {flags}")
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"lm loss: (\S+)", run.stdout)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5


LATE = {
    "--log-straggler --sft": "--sft, --log-straggler: not supported by cp_plugin.pretrain_gpt",
    "--log-straggler": "--log-straggler: not supported by cp_plugin.pretrain_gpt",
    "--no-such-flag 3": "no such flags: --no-such-flag 3",
    "no": "no: belongs to no flag; flags begin with --",
    "--tokenizer-type Nul": "--tokenizer-type Nul: ",
    "--lr fast": "--lr fast: write a number",
    "--bf16 --fp16": "--bf16: stops at assert not args.bf16 (arguments.py:",
    "--use-megatron-fsdp --use-distributed-optimizer": "--ckpt-format torch_dist: Megatron-FSDP requires",
    "--context-parallel-size 2 --cp-provider ring --cp-layout zigzag --seq-length 62": "--seq-length 62 cannot be ",
    "--context-parallel-size 2 --cp-provider ring --cp-backend te": "--cp-backend te cannot run here",
}
"""Refused by Megatron's parser, before its validation, and after that: it then has printed all arguments."""


@pytest.mark.parametrize("flags", LATE)
def test_a_later_refusal_is_one_message_of_all_ranks(flags: str, train: Train) -> None:
    run = train(f"{'' if flags == '--log-straggler' else '--nproc 2'} {ONE_STEP} {flags}")
    assert run.returncode == refusals.STATUS
    assert run.stdout == "", "no dump of arguments"
    assert re.fullmatch(f"cp_plugin: {re.escape(LATE[flags])}.*\n", run.stderr), "once, and no traceback"


IN_SETUP = {
    ("--num-experts 4 --moe-router-topk 8", ""): r"Megatron fails \(the first step.*\): stops at .* with topk = 8",
    (
        "--te-precision-config-file none",
        "",
    ): r"Megatron fails \(.*\): --te-precision-config-file none: stops at .*No such file",
    ("--log-interval 0", ""): r"Megatron fails \(the first step, logging\): --log-interval 0: stops at if",
    ("", "--eval-interval 1000"): r"Megatron fails \(building the datasets\): .*, --eval-interval \(not given\): ",
    ("", "--mock-data"): "there is no data to train on: add --data-path PREFIX, or --mock-data",
    (
        "--data-path /no",
        "--mock-data",
    ): r"Megatron fails \(building the datasets\): .* prefix /no \(indexed_dataset.py:",
    ("--load DIR", ""): r"Megatron fails \(reading a checkpoint\): stops at .*: ValueError: invalid literal",
}
"""Flags, and those left out -> what stops a run after the flags are valid."""


@pytest.mark.parametrize(("flags", "without"), IN_SETUP)
def test_an_error_in_the_set_up_of_megatron_is_one_line(flags: str, without: str, tmp_path: Path, train: Train) -> None:
    """The checkpoint's file is as a kill leaves it: Megatron would exit with status 0."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    usual = f"{ONE_STEP} --context-parallel-size 2 --cp-provider ring".replace(without, "")
    run = train(f"--nproc 2 {usual} {flags}".replace("DIR", str(tmp_path)))
    assert run.returncode == refusals.STATUS, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("cp_plugin: ")]
    assert re.match(f"cp_plugin: {IN_SETUP[flags, without]}", line) and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("whose", ["a script's", "Megatron's, asked for"])
def test_other_errors_keep_their_traceback(whose: str, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from cp_plugin.megatron.models import gpt

    if whose == "a script's":
        monkeypatch.setattr(gpt, "build_model", lambda *_, **__: 1 // 0)
    else:
        monkeypatch.setenv("CP_PLUGIN_TRACEBACK", "1")
    run = train(f"--nproc 2 {ONE_STEP} {'' if whose == "a script's" else '--log-interval 0'}")
    assert run.returncode == 1 and "Traceback" in run.stderr and "ZeroDivisionError" in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("module", "error", "named"),
    [
        ("megatron.core.x", RuntimeError("no such head"), True),
        ("megatron.core.x", RuntimeError("[/x/gloo/pair.cc:537] Read error: Connection reset by peer"), False),
        ("torch.distributed.distributed_c10d", RuntimeError("closed"), False),
        ("cp_plugin.megatron.patches.x", RuntimeError("ours"), False),
        ("helper_of_a_script", RuntimeError("theirs"), False),
    ],
)
def test_whose_error_it_is(module: str, error: Exception, named: bool) -> None:
    """A message that is lost fails with another rank, wherever it is waited for."""
    from cp_plugin.megatron.flags import stops

    names = {"__name__": module, "error": error}
    exec(compile("def f():\n    raise error", "/some/where.py", "exec"), names)
    with pytest.raises(RuntimeError) as raised:
        names["f"]()  # type: ignore[operator]
    assert (stops.stopped(raised.value) is not None) == named


def test_every_listed_flag_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.training import arguments

    from cp_plugin.megatron.models import gpt

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *ONE_STEP.split()])
    args = arguments.parse_args()
    gpt.refuse(args)
    for flag in gpt.UNSUPPORTED:
        name = flag.removeprefix("--").replace("-", "_")
        setattr(args, name, ["given"])
        with pytest.raises(ValueError, match=f"^{flag}: not supported"):
            gpt.refuse(args)
        setattr(args, name, None)
    with pytest.raises(ValueError, match="--mtp-num-layers with --pipeline-model-parallel-layout"):
        gpt.refuse(argparse.Namespace(mtp_num_layers=1, pipeline_model_parallel_layout="Et|m|L"))
