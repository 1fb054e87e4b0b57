"""One training with a fault, in a process of its own: how it ended, when, with what words, and what it left behind.

The runner imports Megatron once and forks each trial from there; a trial calls the same function that
``python -m cp_plugin.pretrain_gpt --nproc N`` does. The runner is the subreaper of what it starts, so a process that
outlives its trial becomes a child of the runner, and is seen.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import victim
from planted import Plant

_PR_SET_CHILD_SUBREAPER = 36
MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 4 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --seq-length 32 --max-position-embeddings 32 --attention-dropout 0 "
    "--hidden-dropout 0 --make-vocab-size-divisible-by 32 --tokenizer-type NullTokenizer --vocab-size 63 "
    "--num-workers 0 --micro-batch-size 1 --global-batch-size 2 --lr 0.001 --lr-decay-style constant --optimizer adam "
    "--weight-decay 0 --clip-grad 1 --log-interval 1 --eval-iters 0 --eval-interval 100000 --no-one-logger"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a trial ended."""

    status: int
    text: str
    """stdout and stderr together."""
    seconds: float
    """From the fault to the end; from the start where no fault happened."""
    left: list[str] = field(default_factory=list)
    """Command lines of processes that it left running (they are killed)."""
    hung: bool = False

    @property
    def losses(self) -> dict[int, str]:
        """Iteration -> loss, all bits."""
        return {int(step): loss for step, loss in re.findall(r"^LOSS (\d+) (\S+)$", self.text, re.MULTILINE)}


def preload() -> None:
    """What every trial shares; call it once, before the first."""
    adopt_orphans()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = ["pretrain_gpt"]
    from cp_plugin.pretrain_gpt import _preload

    _preload()
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).parents[1] / "parity"))
    from sides import read_sources_once

    read_sources_once()
    gc.collect()
    gc.freeze()  # so that collections of the trials do not copy these pages


def adopt_orphans() -> None:
    """Be the parent of what outlives a trial of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def train(
    flags: str,
    *,
    ranks: int = 2,
    timeout: float = 20.0,
    plants: Sequence[Plant] = (),
    prepare: Callable[[], None] | None = None,
    meanwhile: Callable[[int, Path], None] | None = None,
    flags_of_rank_1: str = "",
    limit: float = 240.0,
) -> Ended:
    """Train on forked ranks with ``MODEL``, ``flags`` and the faults.

    Args:
        timeout: of torch.distributed, in seconds.
        prepare: called on every rank first.
        meanwhile: called here while it runs, with the launcher's process id and the file that appears with the fault.
        flags_of_rank_1: that no other rank has.
        limit: seconds after which the trial counts as hung, and is killed.
    """

    def rank(words: list[str], mark: Path) -> None:
        if os.environ["RANK"] == "1":
            words = [*words, *flags_of_rank_1.split()]
        if prepare is not None:
            prepare()
        victim.train(words, timeout=timeout, plants=plants, mark=mark)

    def launch(mark: Path) -> int:
        from cp_plugin.testing.launch import main_with_nproc

        words = ["--nproc", str(ranks), *f"{MODEL} {flags}".split()]
        return main_with_nproc(words, functools.partial(rank, mark=mark), preload=lambda: None)

    return run(launch, meanwhile=meanwhile, limit=limit)


def torchrun(
    flags: str, *, ranks: int = 2, options: str = "", timeout: float = 20.0, plants: Sequence[Plant] = ()
) -> Ended:
    """The same under torchrun (here without an interpreter of its own), which starts each rank as one."""
    asked = {"timeout": timeout, "plants": [dataclasses.asdict(p) for p in plants]}
    elastic = f"--nproc-per-node {ranks} --shutdown-timeout 2 {options or '--standalone'}"
    words = f"{elastic} {Path(victim.__file__)} {MODEL} {flags}".split()

    def launch(mark: Path) -> int:
        from torch.distributed.run import main

        fault = json.dumps(asked | {"mark": str(mark)})
        os.environ.update(FAULT=fault, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        main(words)
        return 0

    return run(launch, limit=590)


def run(
    launch: Callable[[Path], int], *, meanwhile: Callable[[int, Path], None] | None = None, limit: float = 240.0
) -> Ended:
    """Call ``launch`` in a forked process, its output caught, with the file that is to hold the time of the fault."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    mark, out = folder / "happened", folder / "output"
    sys.stdout.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _be(functools.partial(launch, mark), out)
    try:
        if meanwhile is not None:
            meanwhile(pid, mark)
        status, hung = _wait(pid, started + limit)
        ended = time.monotonic()
        left = _left_behind()
        since = float(mark.read_text()) if mark.exists() and mark.stat().st_size else started
        text = out.read_text(errors="replace")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Ended(status=status, text=text, seconds=ended - since, left=left, hung=hung)


def _be(launch: Callable[[], int], out: Path) -> None:
    status = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = launch()
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status or 0)


def _wait(pid: int, deadline: float) -> tuple[int, bool]:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), False
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), True


def _left_behind() -> list[str]:
    """Give what ends with its parent a moment; then name what is still there, and end it."""
    deadline = time.monotonic() + 3
    while True:
        _reap()
        alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    names = []
    for process in alive:
        names.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
        process.kill()
    return names


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
