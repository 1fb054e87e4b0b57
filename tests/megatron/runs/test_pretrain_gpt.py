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

from cp_plugin import ContextParallel
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
    "--bf16 --fp16": "the flags are refused: assert not args.bf16 (megatron/training/arguments.py:",
    "--use-megatron-fsdp --use-distributed-optimizer": "the flags are refused: Megatron-FSDP requires",
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


def test_no_data_is_refused_in_one_line(train: Train) -> None:
    run = train(f"--nproc 2 {ONE_STEP} --context-parallel-size 2 --cp-provider ring".replace("--mock-data", ""))
    assert run.returncode == refusals.STATUS and "Traceback" not in run.stderr, run.stderr
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("cp_plugin: ")]
    assert line.startswith("cp_plugin: there is no data to train on: add --data-path PREFIX, or --mock-data")


ERRORS = {
    "a script's": ("", "ZeroDivisionError: integer division or modulo by zero"),
    "Megatron's": ("--log-interval 0", "step 1, logging, training_log: ZeroDivisionError: integer modulo by zero"),
    "an exit with status 0": ("--load DIR", "reading a checkpoint, read_metadata: ValueError: invalid literal for int"),
}
"""Whose -> flags, and what is said."""


@pytest.mark.parametrize("whose", ERRORS)
def test_other_errors_keep_their_traceback(
    whose: str, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's file is as a kill leaves it: Megatron would exit with status 0."""
    from cp_plugin.megatron.models import gpt

    flags, said = ERRORS[whose]
    if whose == "a script's":
        monkeypatch.setattr(gpt, "build_model", lambda *_, **__: 1 // 0)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    run = train(f"--nproc 2 {ONE_STEP} {flags.replace('DIR', str(tmp_path))}")
    assert run.returncode == 1 and "Traceback" in run.stderr, run.stderr
    assert re.search(rf"^cp_plugin: rank \d of 2 on \S+: .*{said}", run.stderr, re.MULTILINE), run.stderr


def test_a_refusal_that_megatron_leaves_with_status_0_is_raised() -> None:
    from cp_plugin.megatron.startup import failures

    with pytest.raises(ValueError, match="provider='rnig'"), failures.reported():
        try:
            ContextParallel("rnig")
        except ValueError:
            sys.exit(0)


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
