"""The fork launcher: results come back, and no failure of a rank is lost or waited for forever."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from processes import alive, interruptible, wait_until

from cp_plugin.testing.launch import RankError, RankTimeout, main_with_nproc, run_ranks


def _rank() -> int:
    return int(os.environ["RANK"])


@pytest.fixture
def little_grace(monkeypatch):
    """Ranks that go on after another has failed are stopped a second later, not four."""
    monkeypatch.setattr("cp_plugin.testing.launch._GRACE_S", 1.0)


def test_results_come_in_rank_order_with_arguments_and_environment():
    def body(offset):
        names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "FLAVOUR")
        return _rank() + offset, [os.environ[n] for n in names], torch.get_num_threads()

    results = run_ranks(body, 3, args=(10,), env={"FLAVOUR": "plain"})
    assert results == [(10 + r, [str(r), "3", "3", "127.0.0.1", "plain"], 1) for r in range(3)]


def test_a_rank_may_leave_early_and_sys_exit_zero_is_a_success():
    def body():
        dist.barrier()
        if _rank() == 0:
            sys.exit(0)
        time.sleep(0.3)
        peers = torch.tensor([1.0])
        dist.send(peers, 2) if _rank() == 1 else dist.recv(peers, 1)
        return "late"

    assert run_ranks(body, 3, init_process_group=True) == [None, "late", "late"]


@pytest.mark.usefixtures("little_grace")
def test_the_first_failing_rank_comes_first_and_all_tracebacks_are_there():
    def body():
        if _rank() == 2:
            print("rank two says goodbye")
            raise ValueError("planted fault")
        dist.barrier()

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(body, 4, init_process_group=True)
    text = str(caught.value)
    assert caught.value.rank == 2
    assert "ValueError: planted fault" in caught.value.traceback
    assert text.index("planted fault") < text.index("in barrier")
    assert "rank 2 of 4 failed first" in text and "rank two says goodbye" in text
    assert all(f"{r}" in text for r in (0, 1, 3))
    assert time.monotonic() - start < 15


def _waits_in_python():
    threading.Event().wait()


def _ends(how):
    """Rank 1 ends in this way, rank 0 returns."""
    return lambda: how() if _rank() == 1 else None


@pytest.mark.usefixtures("little_grace")
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (lambda: {}["gone"] if _rank() == 1 else _waits_in_python(), 1, "still running when stopped.*in _waits_in_py"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL) if _rank() else dist.barrier(), -9, "killed by SIGKILL.*memory"),
        (_ends(lambda: os.kill(os.getpid(), signal.SIGSEGV)), -11, r"SIGSEGV.*in <lambda>"),
        (_ends(lambda: os._exit(7)), 7, "ended with status 7 without returning"),
        (_ends(lambda: sys.exit(5)), 5, r"sys.exit\(5\)"),
        (_ends(lambda: lambda: None), 1, "a function, cannot be pickled"),
    ],
    ids=["others do not notice", "killed", "crash", "exit", "sys.exit", "no pickle"],
)
def test_a_rank_that_fails_is_named(body, status, said):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(body, 2, init_process_group=True)
    assert caught.value.rank == 1 and caught.value.exit_status == status
    assert re.search(said, str(caught.value), re.DOTALL), str(caught.value)
    assert time.monotonic() - start < 15


def test_a_hang_ends_with_the_stacks_of_all_ranks():
    with pytest.raises(RankTimeout) as caught:
        run_ranks(lambda: _waits_in_python() if _rank() else dist.barrier(), 3, init_process_group=True, timeout=2)
    text = str(caught.value)
    assert "3 of 3 ranks had not finished after 2 s" in text and "_waits_in_python" in text and "in barrier" in text


@pytest.mark.usefixtures("little_grace")
@pytest.mark.parametrize("quiet", [False, True])
def test_ranks_with_the_same_story_share_one_paragraph(quiet):
    """What rank 0 said on the console is not repeated; where it was quiet, another rank's words are told once."""

    def body():
        dist.barrier()  # all are connected: a rank that fails before would end others in another way
        if quiet and not _rank():
            dist.barrier()
        print("told by", _rank())
        raise ValueError("planted fault")

    with pytest.raises(RankError) as caught:
        run_ranks(body, 4, init_process_group=True)
    text = str(caught.value)
    assert text.count("ValueError: planted fault") == 1 and text.count("told by") == quiet


def test_output_modes(capfd):
    def body():
        print(f"out of {_rank()}")
        print(f"err of {_rank()}", file=sys.stderr)

    run_ranks(body, 2)
    assert capfd.readouterr() == ("out of 0\n", "err of 0\n")
    run_ranks(body, 3, output="ends")
    out, err = capfd.readouterr()
    assert sorted(out.split()) == ["0", "2", "of", "of", "out", "out"] and err == "err of 0\n"
    run_ranks(body, 2, output="all")
    out, err = capfd.readouterr()
    assert sorted(out.split("\n")) == ["", "out of 0", "out of 1"] and "err of 1" in err


def test_ranks_and_what_they_started_die_with_the_parent(tmp_path):
    code = (
        "import os, subprocess, sys, time\n"
        "from cp_plugin.testing.launch import run_ranks\n"
        "def body():\n"
        "    rank = os.environ['RANK']\n"
        "    helper = subprocess.Popen(['sleep', '300']) if rank == '0' and sys.argv[2] == 'helper' else None\n"
        "    open(f'{sys.argv[1]}{rank}.tmp', 'w').write(f'{os.getpid()} {helper.pid if helper else os.getpid()}')\n"
        "    os.rename(f'{sys.argv[1]}{rank}.tmp', f'{sys.argv[1]}{rank}')\n"
        "    time.sleep(300)\n"
        "run_ranks(body, 2, timeout=None)\n"
    )
    ends = {signal.SIGINT: "helper", signal.SIGKILL: "alone"}  # after SIGKILL nothing can clean up but the kernel
    parents = {
        how: subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / how.name, helper],
            stderr=subprocess.DEVNULL,
            preexec_fn=interruptible,
        )
        for how, helper in ends.items()
    }
    for how, parent in parents.items():
        files = [tmp_path / f"{how.name}{rank}" for rank in (0, 1)]
        wait_until(lambda files=files: all(file.exists() for file in files))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(alive, pids))
        parent.send_signal(how)
        parent.wait(timeout=30)
        wait_until(lambda pids=pids: not any(map(alive, pids)))


def test_no_file_descriptor_or_process_is_left_behind():
    def failing():
        if _rank():
            raise ValueError("planted")

    run_ranks(_rank, 2)
    before = sorted(os.listdir("/proc/self/fd"))
    run_ranks(_rank, 2)
    with pytest.raises(RankError):
        run_ranks(failing, 2)
    with pytest.raises(RankTimeout):
        run_ranks(lambda: time.sleep(100), 2, timeout=0.2)
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_what_a_failed_run_leaves_behind_does_not_harm_later_ranks():
    def failing():
        raise ValueError("planted")

    gc.disable()
    try:
        for _ in range(8):  # enough for the stacks of threads that own nothing any more to be unmapped
            try:
                run_ranks(failing, 1)
            except RankError as error:
                error.itself = error  # garbage that keeps the frames of the failed run until a collection finds it
        assert len(run_ranks(gc.collect, 2)) == 2, "both ranks collected the garbage and lived"
    finally:
        gc.enable()


def test_main_with_nproc(tmp_path):
    def run(*argv):
        main_with_nproc(
            list(argv),
            lambda words: (tmp_path / os.environ.get("RANK", "alone")).write_text(" ".join(words)),
            preload=list,
        )

    run("a", "--nproc", "2")
    run("--nproc=2", "b")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"alone": "a --nproc 2", "0": "b", "1": "b"}
    for bad in (["--nproc"], ["--nproc", "none"], ["--nproc=0"]):
        with pytest.raises(ValueError, match=r"--nproc .*: write the number of ranks"):
            run(*bad)


def test_ranks_are_not_forked_from_a_process_that_has_initialised_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    with pytest.raises(ValueError, match=r"--nproc 3: .*initialised CUDA.*torchrun --nproc-per-node 3 instead"):
        main_with_nproc(["--nproc", "3"], lambda words: None, preload=lambda: None)
    seen: list[list[str]] = []
    assert main_with_nproc(["a"], seen.append, preload=lambda: None) == 0 and seen == [["a"]], "no fork, no matter"
