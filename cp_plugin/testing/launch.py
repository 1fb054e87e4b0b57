"""Fork N ranks on one machine: import once, fork N times, lose no error.

    parent: imports torch (and whatever `preload` names) --- fork ---> rank 0, rank 1, ... rank N-1
              hosts the rendezvous store                               each leaves one message:
              waits, reports, kills                <--- eventfd -----  its result, or its traceback

Ranks share the imported libraries: 64 of them fit where 64 interpreters do not, and start in the time of one import.
Whatever goes wrong in a rank is reported: an exception, a signal, a hang. The parent never waits forever.

Fork before CUDA is initialised, and not while another thread is inside torch; each rank has one torch thread, since
OpenMP's pool does not survive a fork. Linux only (process file descriptors, parent-death signal).
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist

from cp_plugin.engine.common import refusals
from cp_plugin.engine.common.text import wrap_for_terminal
from cp_plugin.testing.launch_rank import Job, Message, live, passing_on_sigterm
from cp_plugin.testing.nproc import split_nproc

OUTPUTS = ("rank0", "ends", "all")
_GRACE_S = 4.0  # after the first failure: for the other ranks' tracebacks and the alarm's report
_DUMP_S = 5.0  # longest wait for a rank to write its stacks
_EXIT_S = 5.0  # after all results are in: time for the ranks to leave
_TAIL_LINES = 30
_PEER = re.compile(r"\[[\d.]+\]:\d+")  # addresses in Gloo's errors differ between ranks


class RankError(RuntimeError):
    """A rank failed: `rank` is the first one that did, `traceback` its traceback (or what is known instead).

    `exit_status` is that rank's: 1 for an exception, n for `sys.exit(n)`, -signal for a signal. `refusals` has each
    message once if no rank failed in another way (`common.refusals`), with a rank unless all ranks say the same.
    """

    def __init__(
        self, message: str, *, rank: int, traceback: str, exit_status: int = 1, refusals: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.exit_status = exit_status
        self.refusals = refusals


class RankTimeout(RankError):
    """The ranks did not finish in time; `traceback` has the Python stacks of the first one still running."""


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A forked process as seen by the parent."""

    rank: int
    pid: int
    pidfd: int
    done: int  # an eventfd: the outbox holds its message
    outbox: int
    log: int
    stacks: int
    message: Message | None = None
    status: int | None = None  # as os.waitstatus_to_exitcode says, once collected

    @property
    def failed(self) -> bool:
        return self.message is not None and self.message.error is not None

    def read_message(self) -> None:
        """Read its message if there is one."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.done)
            with os.fdopen(self.outbox, "rb", closefd=False) as file:
                file.seek(0)
                self.message = pickle.load(file)  # noqa: S301  (only forked ranks write to it)

    def collect(self) -> None:
        """Collect the exit status of a process that has ended; one that left no message has failed."""
        self.read_message()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its children; the pid is ours until waitpid
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.message is None or (not self.failed and self.status != 0):
            text, when = f"the process ended with status {self.status} without returning a result\n", time.monotonic()
            if self.status < 0:
                name = signal.Signals(-self.status).name
                why = " (which the kernel also sends when memory runs out)" if name == "SIGKILL" else ""
                text, when = f"killed by {name}{why}\n", 0.0  # the cause: it sorts before the errors it leads to
            self.message = Message(error=text + _text(self.stacks), time=when, status=self.status or 1)

    def kill(self) -> None:
        """Kill the process and all that it started, and collect it."""
        if self.status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # if it has not reached its setsid yet
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.status = -signal.SIGKILL

    def close(self) -> None:
        self.kill()
        for fd in (self.pidfd, self.done, self.outbox, self.log, self.stacks):
            os.close(fd)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout: float | None = 60.0,
    env: Mapping[str, str] | None = None,
    init_process_group: bool = False,
    output: str = "rank0",
    pass_on_sigterm: bool = False,
) -> list[Any]:
    """Fork `world_size` ranks, call `fn(*args)` in each, and return the results in rank order.

    `fn` may be a closure. Each rank has torchrun's environment variables, then `env` on top. The parent hosts the
    rendezvous store on a port that it never gives up, so runs cannot collide; the store serves the whole run, so a rank
    cannot initialise torch.distributed twice. A rank that calls `sys.exit(0)` returns None.

    timeout: seconds for everything, None for no limit.
    init_process_group: initialise torch.distributed with Gloo before `fn`.
    output: "rank0" shows rank 0's output and keeps the others' for an error report, "ends" also shows the last rank's
        stdout (where Megatron prints losses), "all" shows everything.
    pass_on_sigterm: forward SIGTERM to the ranks and end with them; otherwise the caller's handler stays.

    Raises ValueError for bad arguments, RankError when a rank fails (ranks still running are stopped after a short
    grace period), RankTimeout at the time limit.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: at least one rank is needed")
    if output not in OUTPUTS:
        raise ValueError(f"output={output!r}: choose one of {', '.join(OUTPUTS)}")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout={timeout}: give a positive number of seconds, or None for no limit")
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=max(128, world_size)))
        wait_end, hold_end = os.pipe()  # finished ranks block on it until the parent closes its end
        release = contextlib.ExitStack()
        release.callback(os.close, hold_end)
        stack.callback(os.close, wait_end)
        stack.enter_context(release)
        job = Job(
            fn=fn,
            args=tuple(args),
            env=dict(env or {}),
            world_size=world_size,
            timeout=timeout,
            output=output,
            init_process_group=init_process_group,
            port=listener.getsockname()[1],
            parent=os.getpid(),
        )
        for rank in range(world_size):
            ranks.append(_fork(rank, job, wait_end, unwanted=(hold_end, listener.fileno())))
            stack.callback(ranks[-1].close)
        if pass_on_sigterm:
            stack.enter_context(passing_on_sigterm(lambda: [r.pid for r in ranks if r.status is None]))
        # Created after the forks, since it starts a thread.
        listen = os.dup(listener.fileno())
        store = [dist.TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False, master_listen_fd=listen)]
        stack.callback(store.clear)  # not left to a traceback that keeps this frame
        _await_messages(ranks, job)
        release.close()
        _await_exit(ranks, job)
    return [torch.load(io.BytesIO(r.message.result), weights_only=False) for r in ranks]


def main_with_nproc(argv: Sequence[str], main: Callable[[list[str]], object], *, preload: Callable[[], object]) -> int:
    """Run a command line that may start with `--nproc N`; returns the exit status for `sys.exit`.

    Without `--nproc`, `preload()` and `main(argv)` run in this process; exceptions pass through. With it, `preload()`
    runs in this process, and N forked ranks each call `main(rest)`. `preload` does what ranks can share, such as
    importing Megatron, and leaves CUDA alone.

    A failing rank's report goes to stderr; of a refusal (`common.refusals`) only its message. After Ctrl-C the status
    is the shell's. Raises ValueError for `--nproc` without a positive number, or with CUDA.
    """
    nproc, rest = split_nproc(list(argv))
    preload()
    if nproc is None:
        main(rest)
        return 0
    if torch.cuda._initialized:  # CPU mode, which may be on by now, has a stand-in for torch's function
        instead = f"start them with torchrun --nproc-per-node {nproc} instead, or add --cp-device cpu"
        raise ValueError(f"--nproc {nproc}: an import has initialised CUDA, which forked ranks cannot use: {instead}")
    try:
        run_ranks(main, nproc, args=(rest,), timeout=None, output="ends", pass_on_sigterm=True)
    except RankError as error:
        if error.refusals:
            lines = "\n".join(f"cp_plugin: {said}" for said in error.refusals)
            print(wrap_for_terminal(lines, sys.stderr), file=sys.stderr, flush=True)
            return refusals.STATUS
        print(error, file=sys.stderr, flush=True)
        return error.exit_status if error.exit_status > 0 else 128 - error.exit_status
    except KeyboardInterrupt:
        print(f"\ninterrupted; {nproc} ranks stopped", file=sys.stderr, flush=True)
        return 128 + signal.SIGINT
    return 0


def _fork(rank: int, job: Job, wait_end: int, *, unwanted: Sequence[int]) -> _Rank:
    done, outbox = os.eventfd(0, os.EFD_NONBLOCK), os.memfd_create("outbox")
    log, stacks = _scratch_file(), _scratch_file()
    gc.freeze()  # this process's garbage may own threads that do not exist in the rank
    with warnings.catch_warnings():
        # Python warns of threads in the parent: usually torch's idle pools, which ranks do not use.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for fd in unwanted:
                os.close(fd)
            status = live(rank, job, log=log, stacks=stacks, outbox=outbox, done=done)
            if status == 0:
                os.read(wait_end, 1)  # keep connections open until all ranks are done
        finally:
            os._exit(status)
    gc.unfreeze()
    return _Rank(rank=rank, pid=pid, pidfd=os.pidfd_open(pid), done=done, outbox=outbox, log=log, stacks=stacks)


def _await_messages(ranks: Sequence[_Rank], job: Job) -> None:
    """Return when every rank has sent a result; raise when one has failed or time is up."""
    limits = [math.inf if job.timeout is None else time.monotonic() + job.timeout]
    failing = False
    while any(r.message is None for r in ranks) and _read_next(ranks, min(limits)):
        if not failing and any(r.failed for r in ranks):
            failing = True
            limits.append(time.monotonic() + _GRACE_S)
    running = [r for r in ranks if r.message is None]
    if running or any(r.failed for r in ranks):
        _dump_stacks(running)
        for rank in running:
            rank.kill()
        raise _error(ranks, job)


def _await_exit(ranks: Sequence[_Rank], job: Job) -> None:
    """Collect the processes after all results are in, and notice one that dies on its way out."""
    deadline = time.monotonic() + _EXIT_S
    while any(r.status is None for r in ranks) and _read_next(ranks, deadline):
        pass
    if any(r.failed for r in ranks):
        raise _error(ranks, job)


def _read_next(ranks: Sequence[_Rank], deadline: float) -> bool:
    """Wait for messages and ends of processes, and read and collect them; False when time is up."""
    waiting = {r.done: r.read_message for r in ranks if r.message is None}
    waiting |= {r.pidfd: r.collect for r in ranks if r.status is None}
    left = deadline - time.monotonic()
    for fd in connection.wait(waiting, None if left == math.inf else max(0.0, left)):
        waiting[fd]()
    return time.monotonic() < deadline


def _dump_stacks(running: Sequence[_Rank]) -> None:
    """Make running ranks write their stacks, and wait until the files stop growing."""
    for rank in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_S
    before: list[int] = []
    while running and time.monotonic() < deadline:
        time.sleep(0.1)
        sizes = [os.fstat(r.stacks).st_size for r in running]
        if all(sizes) and sizes == before:
            return
        before = sizes


def _error(ranks: Sequence[_Rank], job: Job) -> RankError:
    """Everything that is known, the first failure first; ranks with the same story share one paragraph and one log,
    unless that is rank 0's, which is on the console."""
    failed = sorted((r for r in ranks if r.failed), key=lambda r: r.message.time)
    running = [r for r in ranks if r.message is None]
    texts = {r.rank: r.message.error for r in failed}
    for rank in running:
        stacks = _text(rank.stacks) or "not written (stopped inside a system call?)"
        texts[rank.rank] = "still running when stopped; Python stacks:\n" + stacks
    stories: dict[str, list[int]] = {}
    for rank, text in texts.items():
        stories.setdefault(_PEER.sub("a peer", text), []).append(rank)
    first = (failed or running)[0]
    if failed:
        parts = [f"rank {first.rank} of {job.world_size} failed" + (" first" if len(failed + running) > 1 else "")]
    else:
        parts = [f"{len(running)} of {job.world_size} ranks had not finished after {job.timeout:g} s"]
    for sharing in stories.values():
        names = ", ".join(map(str, sharing))
        parts.append(f"rank{'s' if len(sharing) > 1 else ''} {names}: {texts[sharing[0]].rstrip()}")
    for teller, *others in stories.values() if job.output in ("rank0", "ends") else []:
        tail = _text(ranks[teller].log, at_most=1 << 16).splitlines()[-_TAIL_LINES:]
        if tail and 0 not in others:
            parts.append(f"last output of rank {teller}:\n" + "\n".join(tail))
    message = "\n\n".join(parts)
    if not failed:
        return RankTimeout(message, rank=first.rank, traceback=_text(first.stacks))
    said = {r.message.refusal: r.rank for r in reversed(failed)}
    alone = len(said) == 1 and len(failed) == job.world_size
    return RankError(
        message,
        rank=first.rank,
        traceback=first.message.error,
        exit_status=first.message.status,
        refusals=() if "" in said else [text if alone else f"rank {rank}: {text}" for text, rank in said.items()],
    )


def _scratch_file() -> int:
    """A file descriptor of an empty unnamed file."""
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def _text(fd: int, *, at_most: int = 1 << 20) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, at_most, max(0, size - at_most)).decode("utf-8", "replace")
