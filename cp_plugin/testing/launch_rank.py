"""The life of a forked rank: set up, call the function, leave one message, end.

    fork -> own session, dies with its parent -> output and stack files -> environment -> fn(*args)
         -> Message in the outbox -> wait until every rank is done -> os._exit

`launch` is the parent's side. A rank leaves with `os._exit`, so the parent's exit handlers do not run a second time.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_plugin.engine.common import refusals

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank is told. `parent` is the parent's process id, `port` the rendezvous store's."""

    fn: Callable[..., Any]
    args: Sequence[Any]
    env: Mapping[str, str]
    world_size: int
    timeout: float | None
    output: str
    init_process_group: bool
    port: int
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A rank's last message: its pickled result or an error text; monotonic time; its exit status."""

    result: bytes = b""
    error: str | None = None
    refusal: str = ""
    """The message of an error that needs no traceback (``common.refusals``)."""
    time: float = 0.0
    status: int = 0


def live(rank: int, job: Job, *, log: int, stacks: int, outbox: int, done: int) -> int:
    """Be rank `rank` of `job` in a freshly forked process; returns its exit status. Never raises.

    File descriptors: `log` gets stdout and stderr unless they go to the console; `stacks` the Python stacks of all
    threads on SIGUSR1 or a crash; `outbox` the pickled Message; `done`, an eventfd, is set once that is there.
    """
    try:
        os.setsid()  # Ctrl-C reaches the parent only, and the rank's children can be killed with it
        die_with_parent(job.parent)
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        _redirect(log, rank, job)
        os.environ.update({**_environment(rank, job), **job.env})
        torch.set_num_threads(1)
        if job.init_process_group:
            dist.init_process_group("gloo")
        message = Message(result=_pickled(job.fn(*job.args)))
    except SystemExit as leave:
        message = _exit_message(leave)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        said = refusals.message_of(error) or ""
        message = Message(error=text, refusal=said, time=time.monotonic(), status=1)
    with os.fdopen(outbox, "wb", closefd=False) as file:
        pickle.dump(message, file)
    with contextlib.suppress(OSError, ValueError):  # closed streams; the message matters more
        sys.stdout.flush()
        sys.stderr.flush()
    os.eventfd_write(done, 1)
    return message.status


def _pickled(result: Any) -> bytes:
    file = io.BytesIO()
    try:
        torch.save(result, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(f"the rank's result, a {type(result).__name__}, cannot be pickled: {error}") from error
    return file.getvalue()


def _exit_message(leave: SystemExit) -> Message:
    if leave.code is None or leave.code == 0:
        return Message(result=_pickled(None))
    status = leave.code & 0xFF or 1 if isinstance(leave.code, int) else 1
    text = f"sys.exit({leave.code!r}) was called\n" + "".join(traceback.format_exception(leave))
    return Message(error=text, time=time.monotonic(), status=status)


def die_with_parent(parent: int) -> None:
    """Be killed when the thread that forked this process ends; at once if `parent` has already gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was in place
        os._exit(1)


def _redirect(log: int, rank: int, job: Job) -> None:
    """Point the file descriptors of output that is not shown at `log`, and new Python streams at 1 and 2: the parent's
    may be a test runner's buffers, which are lost with this process."""
    if job.output != "all" and rank != 0:
        os.dup2(log, 2)
        if job.output != "ends" or rank != job.world_size - 1:
            os.dup2(log, 1)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _environment(rank: int, job: Job) -> dict[str, str]:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store
        "OMP_NUM_THREADS": "1",
    }
    if os.path.exists("/sys/class/net/lo"):
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")  # needs no host name that resolves
    return env


@contextlib.contextmanager
def passing_on_sigterm(pids: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Inside the ``with`` block SIGTERM is forwarded to these processes, which may write a checkpoint before they end.
    Only the main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _: object) -> None:
        for pid in pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
