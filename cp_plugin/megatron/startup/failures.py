"""Reports of a failing rank: rank, host, step, activity, and the collective that failed or was waited for.

    cp_plugin: rank 1 of 4 on node0: step 7, backward, backward exchange along 'ring' with ranks 0, 2: RuntimeError: ...
      ranks 0, 3: no error; step 7, reduction of gradients, in all_reduce over ranks 0-3 (start_grad_sync)
      no response from rank 2 on node0 (killed, suspended, unreachable, or holding the GIL)

Nothing is tracked in advance: activity and collective are read from Python's stack once something has failed.

On CUDA a missing message raises no error: the program waits for the device elsewhere until NCCL's watchdog ends it, and
torch's flight recorder names the message (``TORCH_NCCL_TRACE_BUFFER_SIZE``).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

import torch.distributed as dist
from megatron.training import global_vars
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import CheckpointException

from cp_plugin.engine.comm import MessageError, group
from cp_plugin.engine.comm.alarm import Alarm
from cp_plugin.engine.common import refusals
from cp_plugin.engine.common.text import ranks_named
from cp_plugin.megatron.state import STATE

_DOING = {  # Megatron's function -> activity; the innermost counts
    "initialize_megatron": "start",
    "setup_model_and_optimizer": "building the model",
    "build_train_valid_test_data_iterators": "building the datasets",
    "load_checkpoint": "reading a checkpoint",
    "read_metadata": "reading a checkpoint",
    "save_checkpoint": "writing a checkpoint",
    "train_step": "between phases of the step",
    "evaluate": "evaluation",
    "forward_step": "forward",
    "backward_step": "backward",
    "finalize_model_grads": "reduction of gradients",
    "training_log": "logging",
}
_SELFCHECK = "cp_plugin.megatron.selfcheck.step"


def exchange_reports() -> None:
    """Exchange failure reports with the other ranks from now on."""
    if STATE.alarm is None and dist.is_initialized() and dist.get_world_size() > 1:
        store = distributed_c10d._get_default_store()
        STATE.alarm = Alarm(store, dist.get_rank(), dist.get_world_size(), _where_main_thread_is)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Report an error that ends the ``with`` block to the other ranks, print the joint report, and re-raise.

    Not a refusal in the first step or before: all ranks refuse, and its message says all. An exit with status 0 while
    Megatron handles an error becomes that error.
    """
    try:
        yield
    except (Exception, CheckpointException, SystemExit) as raised:  # torch's checkpoint error is no Exception
        error = raised
        if isinstance(raised, SystemExit) and raised.code in (None, 0) and raised.__context__ is not None:
            error = raised.__context__
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        refused = refusals.message_of(error) is not None and not finished_steps()
        if STATE.alarm is not None and not refused:
            with _sigterm_waits():  # torchrun kills the others as soon as one has failed
                report = STATE.alarm.give(described(error))
            if report is not None:
                error.add_note(report)
                print(f"cp_plugin: {report}", file=sys.stderr, flush=True)
        if error is not raised:
            raise error from None
        raise


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Ignore SIGTERM in the ``with`` block if it has its default action; only the main thread can do so."""
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as back:
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            back.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        yield


def described(error: BaseException) -> str:
    """``step 7, backward exchange along 'ring' with ranks 0, 2: Connection closed by peer``, from the traceback."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    named, cause = _collective(frames), error
    if isinstance(error, MessageError):
        named, cause = str(error.named), error.__cause__ or error
    return f"{', '.join([*_place(frames), named])}: {summary(cause)}"


def _where_main_thread_is() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner_first = [] if frame is None else [one for one, _ in traceback.walk_stack(frame)]
    frames = inner_first[::-1]
    return f"{', '.join(_place(frames))}, in {_collective(frames)}"


def finished_steps() -> int | None:
    """Finished steps; None before the first one begins."""
    return getattr(global_vars._GLOBAL_ARGS, "curr_iteration", None)


def _place(frames: Sequence[FrameType]) -> list[str]:
    """Step, activity and layer from the stack, outermost frame first."""
    iteration = finished_steps()
    doing, layer = "start" if iteration is None else "between steps", ""
    for frame in frames:
        name = frame.f_code.co_name
        checks = frame.f_globals.get("__name__") == _SELFCHECK
        doing = _DOING.get(name, "self-check" if checks else doing)
        if name in ("step", "prepare_grads", "step_with_ready_grads") and "optimizer" in frame.f_code.co_filename:
            doing = "optimizer"
        number = getattr(frame.f_locals.get("self"), "layer_number", None)
        if isinstance(number, int):
            layer = f"layer {number}"
    step = [] if iteration is None else [f"step {iteration + 1}"]
    return [*step, doing, *([layer] if layer else [])]


def _collective(frames: Sequence[FrameType]) -> str:
    """The plugin's message (axis and peers), the collective (its ranks) or else the function the stack ends in."""
    inner_first = frames[::-1]
    for frame in inner_first:
        if frame.f_code.co_filename == group.__file__ and "named" in frame.f_locals:
            return str(frame.f_locals["named"]())
    callers = [f.f_code.co_name for f in inner_first if f"{os.sep}torch{os.sep}" not in f.f_code.co_filename]
    caller = next((name for name in callers if name != "__torch_function__"), "")
    for frame in inner_first:
        if frame.f_code.co_filename == distributed_c10d.__file__ and not frame.f_code.co_name.startswith("_"):
            among = frame.f_locals.get("group")
            ranks = ranks_named(dist.get_process_group_ranks(among)) if isinstance(among, dist.ProcessGroup) else ""
            return f"{frame.f_code.co_name} over {ranks or 'all ranks'} ({caller})"
    return caller


def summary(error: BaseException) -> str:
    """The error's first line without Gloo's source location and advice; of a checkpoint error, the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        return f"on rank {rank} {summary(error.failures[rank][0])}"
    lines = str(error).strip().splitlines()
    text = re.sub(r"^\[[^]]*\.cc:\d+\] ", "", lines[0]).partition(". This is typically")[0] if lines else ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
