"""Failure reports of ranks, and the programs of ci/faults."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm import python

from cp_plugin.engine.comm import GroupMesh, MessageError
from cp_plugin.engine.comm.alarm import Alarm, report
from cp_plugin.testing.launch import RankError, run_ranks

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "ci" / "faults"


def test_one_report_names_all() -> None:
    said = {0: "no error; step 7, forward", 3: "no error; step 7, forward", 4: "step 7: RuntimeError: closed"}
    assert report("rank 1 of 6 on a", "step 7, forward: ValueError: bad", said, {2: "b", 5: "c"}).splitlines() == [
        "rank 1 of 6 on a: step 7, forward: ValueError: bad",
        "  ranks 0, 3: no error; step 7, forward",
        "  rank 4: step 7: RuntimeError: closed",
        "  no response from rank 2 on b (killed, suspended, unreachable, or holding the GIL)",
        "  no response from rank 5 on c (killed, suspended, unreachable, or holding the GIL)",
    ]


def test_a_rank_that_fails_tells_the_others() -> None:
    def rank() -> str | None:
        alarm = Alarm(dist.distributed_c10d._get_default_store(), dist.get_rank(), 3, lambda: "in step 5")
        dist.barrier()
        time.sleep((2.0, 0.0, 0.5)[dist.get_rank()])  # rank 2 fails, too, a moment later
        return alarm.give("boom") if dist.get_rank() else None

    said = run_ranks(rank, 3, init_process_group=True)[1]
    assert said is not None and said.startswith("rank 1 of 3 on ") and said.splitlines()[0].endswith(": boom")
    assert said.splitlines()[1:] == ["  rank 0: no error; in step 5", "  rank 2: boom"]


def test_a_lost_message_has_its_name() -> None:
    def rank() -> None:
        mesh = GroupMesh.from_group({"ring": 2}, dist.group.WORLD)
        if mesh.index == 1:
            os._exit(0)
        with mesh.ledger.phase("backward"):
            mesh.shift("ring", (torch.zeros(4),)).wait()

    with pytest.raises(RankError, match="MessageError: backward exchange along 'ring' with rank 1 failed: "):
        run_ranks(rank, 2, init_process_group=True)
    assert issubclass(MessageError, RuntimeError)


def test_an_unknown_fault_is_refused() -> None:
    text = "import sys, run, typer; sys.argv[1:] = ['--only', 'kill-forwards']; typer.run(run.main)"
    ended = python(text, FAULTS)
    assert ended.returncode == 2 and "--only kill-forwards: did you mean kill-forward" in ended.stderr


def test_a_leak_is_found() -> None:
    samples = "[[100 + leak * i, 50, 3, 1, 9] for i in range(9)]"
    ended = python(f"import soak; print([soak.grown({samples})['memory, MB'] for leak in (0, 10)])", FAULTS)
    assert ended.stdout.strip() == "[0, 30]", ended.stderr
