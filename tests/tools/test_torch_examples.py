"""The plain-torch examples run as documented, equal one device, and notice mistakes."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # else every rank's optimizer would import it, for more than a second
from nightly import nightly, one_case
from warm import run_forked

from cp_plugin.engine.core.options import Options
from cp_plugin.engine.core.problem import Problem
from cp_plugin.testing.launch import RankError, run_ranks
from cp_plugin.testing.traffic import price

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "4")


def load(tmp_path: Path, name: str, right: str = "", wrong: str = "") -> Mapping[str, Any]:
    """What an example defines, with a mistake planted."""
    text = (EXAMPLES / name).read_text()
    assert right in text
    copy = tmp_path / name
    copy.write_text(text.replace(right, wrong) if right else text)
    return runpy.run_path(str(copy))


def finetune(example: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Run it on four ranks, as it does itself."""
    monkeypatch.setattr(sys, "argv", ["finetune.py", *flags])
    args = example["arguments"]()
    run_ranks(example["main"], args.ranks, args=(args,), output="all")


@pytest.mark.parametrize("launcher", [None, pytest.param(TORCHRUN, marks=nightly)], ids=["forked", "torchrun"])
def test_attention(launcher: tuple[str, ...] | None) -> None:
    root, file = EXAMPLES.parent, str(EXAMPLES / "torch_attention.py")
    if launcher is None:
        done = run_forked(lambda: runpy.run_path(file, run_name="__main__"))
    else:
        paths = os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        done = subprocess.run([sys.executable, *launcher, file], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.search(r"relative error of output, dq, dk, dv: (.+)", done.stdout)
    assert errors is not None and max(map(float, errors[1].split(", "))) < 1e-6, done.stdout
    problem = Problem(size=4, heads=8, kv_heads=2, head_dim=64, seq_length=2048, batch=2, dtype=torch.float32)
    (row,) = price(("striped",), problem, Options())
    formula = {phase: sum(n for (p, _), n in row.ranks[0].items() if p == phase) for phase in ("forward", "backward")}
    assert f"bytes sent by rank 0: {formula}" in done.stdout


def test_attention_with_wrong_positions_is_noticed(tmp_path: Path) -> None:
    example = load(tmp_path, "torch_attention.py", "own = cp.positions(TOKENS)", "own = torch.arange(TOKENS // 4)")
    with pytest.raises(RankError, match="not the attention of one device"):
        run_ranks(example["main"], 4)


@one_case
@pytest.mark.parametrize("provider", ["attention2d", "striped"])
def test_finetuning(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--provider", provider, "--steps", "6", "--seq-length", "64"]
    finetune(load(tmp_path, "finetune.py"), monkeypatch, *flags)
    text = capfd.readouterr().out
    assert re.search(r"4 ranks equal one within \d\.\de-\d\d \(allowed 1e-05\) over 6 steps", text), text


@one_case
@pytest.mark.parametrize(
    "right, wrong",
    [
        ("cp.positions(len(tokens))", "torch.arange(len(tokens) // cp.size)"),
        ("self.cp.attention(q, k, v, causal=True)", "self.cp.attention(q, k, v, causal=False)"),
        ("(loss * ranks).backward()", "loss.backward()"),
    ],
    ids=["positions", "mask", "mean of gradients"],
)
def test_finetuning_with_a_mistake_is_noticed(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load(tmp_path, "finetune.py", right, wrong)
    with pytest.raises(RankError, match="AssertionError"):
        finetune(example, monkeypatch, "--steps", "4", "--seq-length", "64")
