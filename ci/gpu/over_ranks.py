"""Cases over processes that are the ranks of a process group, NCCL or Gloo; each is known as soon as it is done.

A rank says at its end of a case what it found. A case is done when every rank has; one that stops the ranks, or that
some of them do not come out of, is known by its ranks that said nothing. The cases after it start in new processes.

Where there are fewer GPUs than ranks, several ranks share one: NCCL refuses that among ranks of one host only, and
``NCCL_HOSTID`` says which host a rank is on. Their messages then go through sockets: slow, and NCCL's own in all else.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from record import in_a_line

from cp_plugin.launch import RankError, RankTimeout, run_ranks

AT_ONCE = 16
"""Cases of the same processes: each makes groups, whose connections and memory last as long as the processes."""
CASE_S = 60.0
"""Seconds in which every rank must come to the end of a case."""
Done = Callable[[int, list[Any] | str], None]
"""Told of every case, by its number: what each rank found, or what stopped them."""


def over_ranks(
    each: Callable[[int], Any],
    cases: int,
    done: Done,
    *,
    ranks: int,
    devices: int,
    seconds: Callable[[], float],
    case_s: float = CASE_S,
    env: Mapping[str, str] | None = None,
) -> None:
    """Call ``each`` with every case's number on every rank.

    Args:
        each: its result must be fit for JSON.
        devices: GPUs; 0: Gloo on the CPU.
        seconds: how many are left. Where they are not positive no case is told of any more.
        env: environment variables of the ranks.
    """
    assert not torch.cuda.is_initialized(), "ranks are forked, which must be before CUDA is touched"
    first = 0
    while first < cases and seconds() > 0:
        last = min(cases, first + AT_ONCE)
        first = _until_one_stops(each, first, last, done, ranks, devices, seconds(), case_s, dict(env or {}))


def _until_one_stops(
    each: Callable[[int], Any],
    first: int,
    last: int,
    done: Done,
    ranks: int,
    devices: int,
    seconds: float,
    case_s: float,
    env: dict[str, str],
) -> int:
    """The number of the first case that was not begun."""
    stacks = [tempfile.TemporaryFile() for _ in range(ranks)]

    def rank(write: int) -> None:
        here = int(os.environ["RANK"])
        join(here, devices, ranks, case_s)
        for case in range(first, last):
            faulthandler.dump_traceback_later(case_s, exit=True, file=stacks[here])
            try:
                found = {"found": each(case)}
            except Exception as error:  # of any library
                traceback.print_exc()
                found = {"failure": in_a_line(error)}
            faulthandler.cancel_dump_traceback_later()
            _say(write, {"rank": here, "case": case} | found)
            if "failure" in found:
                sys.exit(1)

    with _heard(ranks, done) as (write, said):
        try:
            run_ranks(rank, ranks, args=(write,), timeout=seconds, env=env)
        except RankTimeout:  # the time of all cases is over: what has not been told of was not run
            return last
        except RankError as error:
            ended = first_failure(error)
        else:
            return last
    case = next(n for n in range(first, last) if len(said.get(n, {})) < ranks or _failures(said[n]))
    if not _failures(said.get(case, {})):
        silent = [n for n in range(ranks) if n not in said.get(case, {})]
        places = "; ".join(
            f"rank {n} in {_innermost(stacks[n])}" for n in silent if os.fstat(stacks[n].fileno()).st_size
        )
        done(case, f"ranks {silent} did not come to its end within {case_s:g} s; {places or ended}")
    for file in stacks:
        file.close()
    return case + 1


@contextmanager
def _heard(ranks: int, done: Done) -> Iterator[tuple[int, dict[int, dict[int, Any]]]]:
    """A file descriptor to ``_say`` into, and case -> rank -> what it said, which is complete after the block."""
    read, write = os.pipe()
    said: dict[int, dict[int, Any]] = {}

    def listen() -> None:
        with os.fdopen(read) as lines:
            for line in lines:
                row = json.loads(line)
                of_case = said.setdefault(row["case"], {})
                of_case[row["rank"]] = row
                failures = _failures(of_case)
                if "failure" in row and len(failures) == 1:
                    done(row["case"], f"rank {row['rank']}: {row['failure']}")
                elif len(of_case) == ranks and not failures:
                    done(row["case"], [of_case[rank]["found"] for rank in range(ranks)])

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield write, said
    finally:
        os.close(write)  # the ranks, which had it too, have ended
        listener.join()


def _say(write: int, row: dict[str, Any]) -> None:
    line = json.dumps(row).encode() + b"\n"
    assert len(line) <= 4096, "what a pipe takes from several writers in one piece"
    os.write(write, line)


def first_failure(error: RankError) -> str:
    """In a line."""
    return f"rank {error.rank}: {(error.traceback.strip().splitlines() or ['no traceback'])[-1]}"


def _failures(of_case: Mapping[int, Any]) -> list[int]:
    return [rank for rank, row in of_case.items() if "failure" in row]


def _innermost(stacks: Any) -> str:
    """The place a rank is at, by the stacks that ``faulthandler`` wrote: of the thread in our code, if there is one."""
    stacks.seek(0)
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', stacks.read().decode("utf-8", "replace"))
    ours = [frame for frame in frames if "/torch/" not in frame[0] and "/threading.py" not in frame[0]]
    file, line, function = (ours or frames or [("an unknown place", "0", "?")])[0]
    return f"{function} ({os.path.basename(file)}:{line})"


def join(rank: int, devices: int, ranks: int, timeout_s: float) -> None:
    """Become a rank as Megatron's ranks do: without ``device_id``, so that each group is born at its first message."""
    timeout = timedelta(seconds=timeout_s)
    if not devices:
        dist.init_process_group("gloo", timeout=timeout)
        return
    if devices < ranks:
        os.environ.update(shared_gpu(rank))
    torch.cuda.set_device(rank % devices)
    dist.init_process_group("nccl", timeout=timeout)


def shared_gpu(rank: int) -> dict[str, str]:
    """What NCCL has to be told where ranks share a GPU."""
    return {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def device() -> torch.device:
    """This rank's, after ``join``."""
    on_cpu = dist.get_backend() == "gloo"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
