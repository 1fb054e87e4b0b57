"""Failure reports of ranks, recognition of damaged checkpoints, and the programs of ci/faults."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from warm import python

from cp_plugin.comm import GroupMesh, MessageError
from cp_plugin.comm.alarm import Alarm, report
from cp_plugin.testing.launch import RankError, run_ranks
from cp_plugin.testing.launch_signals import frozen

ROOT = Path(__file__).parents[1]
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
        if dist.get_rank() == 1:
            return alarm.give("boom")
        time.sleep(1)
        return None

    said = run_ranks(rank, 3, init_process_group=True)[1]
    assert said is not None and said.startswith("rank 1 of 3 on ") and said.splitlines()[0].endswith(": boom")
    assert said.splitlines()[1:] == ["  ranks 0, 2: no error; in step 5"]


def test_a_frozen_process_is_told_from_a_busy_one() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert not frozen(busy.pid)
        busy.send_signal(signal.SIGSTOP)
        os.waitpid(busy.pid, os.WUNTRACED)
        assert frozen(busy.pid)
    finally:
        busy.kill()
        busy.wait()
    assert not frozen(busy.pid), "gone"


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


def checkpoint(folder: Path, iteration: int, *names: str) -> Path:
    folder = folder / f"iter_{iteration:07d}"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(pickle.dumps(name))
    return folder


def test_complete_checkpoints_are_told_from_others(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from cp_plugin.megatron.startup import saved_files

    checkpoint(tmp_path, 2, ".metadata", "metadata.json", "__0_0.distcp")
    checkpoint(tmp_path, 4, "__0_0.distcp")
    checkpoint(tmp_path, 6)
    assert saved_files.iterations(tmp_path) == [2]
    latest = tmp_path / saved_files.LATEST
    latest.write_text("")
    with saved_files.readable(str(tmp_path), None):
        assert latest.read_text() == "2", "repaired"
    missing = pytest.raises(ValueError, match=r"the checkpoint of iteration 4 is missing .*--ckpt-step 2")
    with missing, saved_files.readable(str(tmp_path), 4):
        raise AssertionError("must not be read")
    short = pytest.raises(ValueError, match=r"iteration 2 cannot be read \(OSError: short\). There is no other")
    with short, saved_files.readable(str(tmp_path), None):
        raise OSError("short")
    left = pytest.raises(ValueError, match=r"iteration 2 cannot be read \(EOFError: cut\)")
    with left, saved_files.readable(str(tmp_path), None):
        try:
            raise EOFError("cut")
        except EOFError:
            sys.exit()


def test_a_sharded_checkpoint_has_no_metadata_json_and_a_truncated_index_is_noticed(tmp_path: Path) -> None:
    """``torch_dcp`` and ``fsdp_dtensor`` are written by torch alone."""
    pytest.importorskip("megatron.core")
    from cp_plugin.megatron.startup import saved_files

    folder = checkpoint(tmp_path, 2, "__0_0.distcp")
    checkpoint(tmp_path, 4, "__0_0.distcp")
    contents = pickle.dumps({f"decoder.layers.{i}.": "." * i for i in range(700)})
    assert contents.count(pickle.STOP) > 10_000 and len(contents) > 3 * (64 << 10), "in several frames"
    for length in (0, 1, 2, 3, 11, *range(12, len(contents), 997), len(contents) - 1):
        (folder / ".metadata").write_bytes(contents[:length])
        assert saved_files.iterations(tmp_path) == [], length
    (folder / ".metadata").write_bytes(contents)
    assert saved_files.iterations(tmp_path) == [2]
    (tmp_path / saved_files.LATEST).write_text("2")
    with saved_files.readable(str(tmp_path), None):
        pass


def test_flags_of_a_model_are_those_of_the_weights_that_megatron_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    from cp_plugin.megatron.inference import saved_model
    from cp_plugin.megatron.startup import saved_files

    monkeypatch.setattr(saved_model, "_common", lambda folder: {"args": Namespace(folder=folder.name)})
    for iteration in (2, 4):
        checkpoint(tmp_path, iteration, ".metadata", "metadata.json", "__0_0.distcp")

    def read(step: int | None) -> str:
        return saved_model.arguments(tmp_path, step).folder

    assert read(None) == "iter_0000004", "no tracker file"
    for text, taken in (("2", "iter_0000002"), ("4", "iter_0000004"), ("9", "iter_0000004"), ("", "iter_0000004")):
        (tmp_path / saved_files.LATEST).write_text(text)
        assert read(None) == taken, text
    assert read(2) == "iter_0000002"


def test_what_torch_collected_from_the_ranks_is_named(tmp_path: Path) -> None:
    """``CheckpointException`` is no ``Exception``."""
    pytest.importorskip("megatron.core")
    from torch.distributed.checkpoint import CheckpointException

    from cp_plugin.megatron.startup import saved_files

    for iteration in (2, 4):
        (tmp_path / f"iter_{iteration:07d}" / "mp_rank_00").mkdir(parents=True)
        (tmp_path / f"iter_{iteration:07d}" / "mp_rank_00" / "model_optim_rng.pt").touch()
    (tmp_path / saved_files.LATEST).write_text("4")
    said = r"4 cannot be read \(on rank 1 EOFError: cut\)\. Complete checkpoints: 2; choose one with --ckpt-step 2"
    with pytest.raises(ValueError, match=said), saved_files.readable(str(tmp_path), None):
        raise CheckpointException("read", {3: (OSError(), None), 1: (EOFError("cut\nhere"), None)})


def test_the_table_of_faults_and_what_its_patterns_demand() -> None:
    """The report of ``raise-forward`` must name every rank; kills during saving cover both formats."""
    first = "cp_plugin: rank 1 of 4 on a: step 3, forward, layer 1, in x: RuntimeError: planted\n"
    complete = "  ranks 0, 2: no error; step 2, logging\n  no response from rank 3 on a (killed)\n"
    found = _python(f"""
import faults, re, saving
names = [f.name for f in faults.FAULTS]
print(len(names), len(set(names)))
says = next(f for f in faults.FAULTS if f.name == "raise-forward").says
below = ({complete!r}, "  ranks 0, 3: no error; step 2, logging\\n  \\n", "rank 0 of 4\\n")
print([bool(re.search(says, {first!r} + text)) for text in below])
print([(c.style, c.kills) for n in (200, 7) for c in saving.chains(n, seed=0)])""")
    assert found.splitlines() == [
        "48 48",
        "[True, False, False]",
        str([("torch", 25), ("torch_dist", 25)] * 4 + [("torch", 4), ("torch_dist", 3)]),
    ]


def test_a_start_that_resumes_wrongly_is_found() -> None:
    at_4 = "loading checkpoint from F at iteration 4\n"
    said = {
        f"{at_4}LOSS 5 e\nLOSS 6 f\n": "5",
        "loading checkpoint from F at iteration 2\nLOSS 3 c\nLOSS 4 d\n": "resumed from 2, but 4 had been saved",
        "LOSS 1 a\n": "resumed from 0, but 4 had been saved",
        "LOSS 5 e\n": "began with step 5 without reading a checkpoint",
        f"{at_4}LOSS 5 e\nLOSS 6 g\n": "has different losses: {6: 'g'}",
        "ValueError: cut\n": "ended with 1, without a step: ValueError: cut",
    }
    found = _python(f"""
import saving, special, trial
for text in {list(said)}:
    try: print(saving.resumed_at(trial.Ended(status=1, text=text, seconds=1), 4, dict(enumerate("abcdef", 1))))
    except special.Wrong as wrong: print(str(wrong).strip())""").splitlines()
    assert len(found) == len(said) and all(map(str.endswith, found, said.values())), found


def test_the_page_is_updated_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- saves -->\nold\n<!-- end of the saves -->\nb\n<!-- faults -->\n<!-- end of the faults -->\nc\n"
    )
    row = {"name": "x", "what": "torch: y", "expect": "ends", "verdict": "ok", "seconds": 1.25}
    saves = [row, row | {"verdict": "WRONG"}]
    text = f"import run, pathlib; run.renew_page([{row}], {saves}, pathlib.Path({str(page)!r}))"
    _python(text)
    lines = page.read_text().splitlines()
    assert lines[0] == "a" and lines[-1] == "c" and "old" not in lines
    assert "1 of 2 kills during saving (2 of `torch`)" in lines[2]
    assert lines[6].startswith("1 of 1 ended as required; the slowest end came 1.2 s after the fault")
    assert json.loads(page.with_suffix(".json").read_text()) == [row]
    page.write_text("nothing")
    with pytest.raises(subprocess.CalledProcessError):
        _python(text)


def test_an_unknown_fault_is_refused() -> None:
    ended = python("import sys, run; sys.argv[1:] = ['--only', 'kill-forwards']; run.app()", FAULTS)
    assert ended.returncode == 2 and "--only kill-forwards: choose one of kill-forward" in ended.stderr


def test_a_leak_is_found() -> None:
    samples = "[soak.Sample(100 + leak * i, 50, 3, 1, 9) for i in range(9)]"
    text = f"import soak; print([soak.grown({samples})['memory, MB'] for leak in (0, 10)])"
    assert _python(text) == "[(0.0, 8.0), (30.0, 8.0)]"


def test_a_wrong_acceptance_is_found() -> None:
    given = "{'--cp-provider': 'attention2d', '--cp-grid': '2x2'}"
    found = _python(f"""
import fuzz_inputs as f; from cp_plugin.megatron.flags import option_flags
f.training({given}, 4)
option_flags.shown = lambda options: {{'--cp-grid': '4x1'}}
try: f.training({given}, 4)
except f.Found as found: print(found)""")
    assert found.endswith("with --context-parallel-size 4: read as {'--cp-grid': '4x1'}")


def _python(text: str) -> str:
    ended = python(text, FAULTS)
    ended.check_returncode()
    return ended.stdout.strip()
