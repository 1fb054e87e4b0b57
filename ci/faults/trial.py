"""One training with a planted fault, in a process of its own: status, duration, output, and processes left behind.

The runner imports Megatron once and forks every trial from there; a trial calls what
``python -m cp_plugin.pretrain_gpt --nproc N`` calls. The runner is the subreaper of its trials, so a process that
outlives its trial becomes a child of the runner and is seen.

Under torchrun this file is the program of every rank:

    FAULT='{"mark": "/tmp/mark", "plants": [{"rank": 1, "do": "kill"}]}' torchrun ... trial.py FLAGS
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from faults import TIMEOUT
from rank_faults import Plant, plant
from warm import fork, read_no_sources

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
    """From the fault to the end; from the start if no fault happened."""
    left: list[str]
    """Command lines of processes left running (they are killed)."""

    @property
    def hung(self) -> bool:
        return self.status == -signal.SIGALRM

    @property
    def losses(self) -> dict[int, str]:
        """Iteration -> loss as a hexadecimal float."""
        return {int(step): loss for step, loss in re.findall(r"^LOSS (\d+) (\S+)$", self.text, re.MULTILINE)}


def preload() -> None:
    """Import what every trial shares; call it once, before the first."""
    adopt_orphans()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.argv = ["pretrain_gpt"]
    from cp_plugin.pretrain_gpt import _preload

    _preload()
    import torch
    import torch._dynamo

    torch.set_num_threads(1)
    read_no_sources()
    gc.collect()
    gc.freeze()  # collections in trials must not copy these pages


def adopt_orphans() -> None:
    """Become the parent of processes that outlive a trial of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def train(
    flags: str,
    *,
    ranks: int = 2,
    plants: Sequence[Plant] = (),
    prepare: Callable[[], None] = lambda: None,
    meanwhile: Callable[[Path], None] = lambda mark: None,
    flags_of_rank_1: str = "",
) -> Ended:
    """Train on forked ranks with ``MODEL``, ``flags`` and the faults.

    Args:
        prepare: called first on every rank.
        meanwhile: called in this process during the training, with the file that appears with the fault.
        flags_of_rank_1: flags that no other rank has.
    """

    def rank(words: list[str], mark: Path) -> None:
        prepare()
        pretrain(words + flags_of_rank_1.split() * (os.environ["RANK"] == "1"), plants, mark)

    def launch(mark: Path) -> int:
        from cp_plugin.testing.launch import main_with_nproc

        words = ["--nproc", str(ranks), *f"{MODEL} {flags}".split()]
        return main_with_nproc(words, functools.partial(rank, mark=mark), preload=lambda: None)

    return run(launch, meanwhile=meanwhile)


def torchrun(flags: str, options: str, plants: Sequence[Plant]) -> Ended:
    """The same on two ranks under torchrun, which starts an interpreter for each."""
    words = f"--nproc-per-node 2 --shutdown-timeout 2 {options} {Path(__file__)} {MODEL} {flags}".split()

    def launch(mark: Path) -> int:
        from torch.distributed.run import main

        fault = json.dumps({"mark": str(mark), "plants": [dataclasses.asdict(plant) for plant in plants]})
        os.environ.update(FAULT=fault, OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        main(words)
        return 0

    return run(launch, limit=590)


def run(
    launch: Callable[[Path], int], *, meanwhile: Callable[[Path], None] = lambda mark: None, limit: int = 240
) -> Ended:
    """Call ``launch`` in a forked process with captured output; its argument is the file for the time of the fault.

    limit: seconds after which it counts as hung and is killed.
    """

    def program() -> int:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return launch(mark)

    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as folder:
        mark, out = Path(folder, "happened"), Path(folder, "output")
        started = time.monotonic()
        with out.open("ab") as output:
            child = fork(program, output.fileno(), output.fileno(), limit)
        meanwhile(mark)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended = time.monotonic()
        left = _left_behind()
        since = float(mark.read_text()) if mark.exists() and mark.stat().st_size else started
        return Ended(status=status, text=out.read_text(errors="replace"), seconds=ended - since, left=left)


def _left_behind() -> list[str]:
    """Command lines of descendants still alive after three seconds, which are killed."""
    deadline = time.monotonic() + 3
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        alive = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        if not alive or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    names = [f"{process.pid} {' '.join(process.cmdline())[:80]}" for process in alive]
    for process in alive:
        process.kill()
    return names


def pretrain(words: list[str], plants: Sequence[Plant], mark: Path) -> None:
    """Pretrain on this rank with the flags, ``TIMEOUT``, and full-precision losses in the output."""
    _set_timeout()
    _print_losses()
    for planted in plants:
        plant(planted, mark)
    from cp_plugin.pretrain_gpt import _train

    _train(words)


def _set_timeout() -> None:
    """Megatron's flag takes whole minutes; the value behind it need not be whole."""
    from cp_plugin.megatron.patches import hooks

    original: Callable[..., contextlib.AbstractContextManager[None]] = hooks.validation

    @contextlib.contextmanager
    def validation(parsed):
        with original(parsed):
            yield
        parsed.distributed_timeout_minutes = TIMEOUT / 60

    hooks.validation = validation


def _print_losses() -> None:
    """Print the loss of every step on each rank that knows it."""
    from megatron.training import training

    step = training.train_step

    @functools.wraps(step)
    def train_step(*args, **named):
        result = step(*args, **named)
        if "lm loss" in result[0]:
            iteration = training.get_args().curr_iteration + 1
            os.write(2, f"\nLOSS {iteration} {float(result[0]['lm loss']).hex()}\n".encode())
        return result

    training.train_step = train_step


if __name__ == "__main__":
    fault = json.loads(os.environ["FAULT"])
    from cp_plugin.pretrain_gpt import _preload

    _preload()
    pretrain(sys.argv[1:], [Plant(**one) for one in fault["plants"]], Path(fault["mark"]))
