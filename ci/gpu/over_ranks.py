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
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from record import OUT_OF_TIME, Step, in_a_line

from cp_plugin.testing.launch import RankError, RankTimeout, run_ranks

AT_ONCE = 16
"""Cases of the same processes: each makes groups, whose connections and memory last as long as the processes."""
CASE_S = 120.0
"""Seconds in which every rank must come to the end of a case, the first of which compile kernels."""
Done = Callable[[int, list[Any] | str], None]
"""Told of every case, by its number: what each rank found, or what stopped them."""


def one_over_ranks(
    step: Step, call: Callable[[], Any], *, ranks: int, env: Mapping[str, str] | None = None
) -> list[Any] | str:
    """What each rank found, or what stopped them; ``call`` as ``each`` of ``over_ranks``."""
    found: list[list[Any] | str] = []
    over_ranks(step, lambda _: call(), 1, lambda _, told: found.append(told), ranks=ranks, env=env)
    return found[0]


def over_ranks(
    step: Step,
    each: Callable[[int], Any],
    cases: int,
    done: Done,
    *,
    ranks: int,
    case_s: float = CASE_S,
    env: Mapping[str, str] | None = None,
) -> None:
    """Call ``each`` with every case's number on every rank.

    Args:
        step: when its time is over, what was not run is told of as ``OUT_OF_TIME``.
        each: its result must be fit for JSON.
        env: environment variables of the ranks.
    """
    assert not torch.cuda.is_initialized(), "ranks are forked, which must be before CUDA is touched"
    told: set[int] = set()

    def tell(case: int, found: list[Any] | str) -> None:
        told.add(case)
        done(case, found)

    launch = _Launch(each, tell, ranks, step.devices, case_s, dict(env or {}))
    first = 0
    while first < cases and not step.late:
        first = launch.until_one_stops(first, min(cases, first + AT_ONCE), step.left)
    for case in sorted(set(range(cases)) - told):
        done(case, OUT_OF_TIME)


@dataclass(frozen=True, slots=True)
class _Launch:
    """How cases are run; the fields as in ``over_ranks``."""

    each: Callable[[int], Any]
    done: Done
    ranks: int
    devices: int
    case_s: float
    env: dict[str, str]

    def until_one_stops(self, first: int, last: int, seconds: float) -> int:
        """The number of the first case that was not begun, or ``last``."""
        with ExitStack() as files:
            stacks = [files.enter_context(tempfile.TemporaryFile()) for _ in range(self.ranks)]
            ended = ""
            with self._heard() as (write, said):
                try:
                    arguments = (first, last, write, stacks)
                    run_ranks(self._rank, self.ranks, args=arguments, timeout=seconds, env=self.env)
                except RankTimeout:  # the time of all cases is over: what has not been told of was not run
                    return last
                except RankError as error:
                    print(error, flush=True)
                    ended = first_failure(error)
            undone = [n for n in range(first, last) if len(_found(said[n])) < self.ranks]
            if not undone:
                return last
            self.done(undone[0], self._why(said[undone[0]], stacks, ended))
            return undone[0] + 1

    def _why(self, of_case: Mapping[int, Any], stacks: Sequence[Any], ended: str) -> str:
        """What is known of a case that not every rank came out of."""
        failures = [f"rank {rank}: {row['failure']}" for rank, row in of_case.items() if "failure" in row]
        if failures:
            return failures[0]
        silent = [rank for rank in range(self.ranks) if rank not in of_case]
        written = [rank for rank in silent if os.fstat(stacks[rank].fileno()).st_size]
        places = "; ".join(f"rank {rank} in {_innermost(stacks[rank])}" for rank in written)
        return f"ranks {silent} did not come to its end within {self.case_s:g} s; {places or ended}"

    @contextmanager
    def _heard(self) -> Iterator[tuple[int, defaultdict[int, dict[int, Any]]]]:
        """A file descriptor to ``_say`` into; and case -> rank -> what it said, complete after the block."""
        read, write = os.pipe()
        said: defaultdict[int, dict[int, Any]] = defaultdict(dict)

        def listen() -> None:
            with os.fdopen(read) as lines:
                for line in lines:
                    row = json.loads(line)
                    said[row["case"]][row["rank"]] = row
                    found = _found(said[row["case"]])
                    if len(found) == self.ranks:
                        self.done(row["case"], found)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            yield write, said
        finally:
            os.close(write)  # the ranks, which had it too, have ended
            listener.join()

    def _rank(self, first: int, last: int, write: int, stacks: Sequence[Any]) -> None:
        here = int(os.environ["RANK"])
        join(here, self.devices, self.ranks, self.case_s)
        for case in range(first, last):
            faulthandler.dump_traceback_later(self.case_s, exit=True, file=stacks[here])
            try:
                found = {"found": self.each(case)}
            except Exception as error:  # of any library
                _say(write, {"rank": here, "case": case, "failure": in_a_line(error)})
                raise
            faulthandler.cancel_dump_traceback_later()
            _say(write, {"rank": here, "case": case} | found)


def _say(write: int, row: dict[str, Any]) -> None:
    line = json.dumps(row).encode() + b"\n"
    assert len(line) <= 4096, "what a pipe takes from several writers in one piece"
    os.write(write, line)


def first_failure(error: RankError) -> str:
    """In a line."""
    return f"rank {error.rank}: {(error.traceback.strip().splitlines() or ['no traceback'])[-1]}"


def _found(of_case: Mapping[int, Any]) -> list[Any]:
    """What those ranks found that came to the end of a case, in their order."""
    return [of_case[rank]["found"] for rank in sorted(of_case) if "found" in of_case[rank]]


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
