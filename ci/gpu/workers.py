"""Cases in processes of their own: side by side on one GPU (``check_each``), or on the ranks of a process group.

Side by side all cores compile kernels, and a lost device affects one process only.

Every rank of a process group, NCCL or Gloo, appends its result of a case to a file of its own. If a case stops the
ranks, or some ranks hang in it, it is reported by the ranks without a result, and the remaining cases run on new
processes. It is wrong, unless a rank was still compiling or autotuning a kernel, or the first failure is a ``refusal``.

With fewer GPUs than ranks several ranks share one: NCCL refuses that only within one host, and ``NCCL_HOSTID`` sets a
rank's host. Messages then go through sockets, which is slow but otherwise NCCL as usual.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from record import OUT_OF_TIME, NotRun, Row, Step, Verdict, lost, stopped

from cp_plugin.testing.launch import RankError, RankTimeout, run_ranks

MOST = 16
"""Processes sharing a GPU."""
AT_ONCE = 16
"""Cases per set of processes: groups, their connections and memory live as long as the processes."""
CASE_S = 30.0
"""Seconds for a case on all ranks; by estimate it takes three, the first ones more, since they compile kernels."""
FIRST_S = 30.0
"""The same for the first words."""
COMPILING = ("/triton/compiler/", "/triton/runtime/autotuner.py", "/triton/runtime/build.py", "/torch/_inductor/")
"""Parts of the paths of what compiles kernels, and of what tries their variants."""


def check_each[C](
    step: Step, run: Callable[[C], Iterator[Row]], groups: Sequence[C], named: Callable[[C], tuple[str, str]]
) -> None:
    """Run all groups, in this order, and record what is found.

    Args:
        named: group and name under which is recorded what ended a group of cases early.
    """
    for group, row in spread(run, groups, inline=step.smoke, seconds=step.left):
        step.add(*(row if len(row) == 4 else (*named(group), *row)))


def spread[C](
    run: Callable[[C], Iterator[Row]], groups: Sequence[C], *, inline: bool, seconds: float
) -> Iterator[tuple[C, Row | Verdict]]:
    """Yield every group with each row of it, as they come, and with what ended it early.

    Args:
        run: a module-level function that yields what it finds of a group, case by case.
        inline: run everything in this process.
        seconds: time for all groups; what is still running then is killed.
    """
    deadline = time.monotonic() + seconds
    late: Verdict = (None, {"reason": OUT_OF_TIME})
    if inline:
        for group in groups:
            rows = run(group)
            while (row := late if time.monotonic() > deadline else next(rows, None)) is not None:
                yield group, row
                if row is late:
                    break
        return
    context, waiting = multiprocessing.get_context("spawn"), list(groups)
    running: dict[Connection, tuple[multiprocessing.process.BaseProcess, C]] = {}
    while waiting or running:
        while waiting and len(running) < min(MOST, os.cpu_count() or 1):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(run, waiting[0], writer), daemon=True)
            process.start()
            writer.close()  # only the process has the other end, so the pipe ends with it
            running[reader] = process, waiting.pop(0)
        for reader in wait(list(running), timeout=max(0.0, deadline - time.monotonic())):
            process, group = running[reader]
            try:
                row = reader.recv()
            except EOFError:
                process.join()
                row = (False, {"failure": f"its process ended with status {process.exitcode}"})
            if row is not None:
                yield group, row
            if row is None or len(row) == 2:
                del running[reader]
        if time.monotonic() > deadline:
            for process, _ in running.values():
                process.kill()
            yield from ((group, late) for group in [*(group for _, group in running.values()), *waiting])
            return


def _work[C](run: Callable[[C], Iterator[Row]], group: C, writer: Connection) -> None:
    """Send every row, then None, or what ended the group: none of it is tried after an error of the device."""
    try:
        for row in run(group):
            writer.send(row)
            if lost(row[3]):
                raise NotRun(f"the device was lost in {row[1]}")
        writer.send(None)
    except BaseException as error:
        writer.send(stopped(error))


def once_on_ranks(
    step: Step, call: Callable[[], Any], *, ranks: int, case_s: float = CASE_S, env: Mapping[str, str] | None = None
) -> list[Any] | Verdict:
    """Call a function on every rank: the results, or what stopped the ranks."""
    ((_, results),) = run_on_ranks(step, lambda _: call(), 1, ranks=ranks, case_s=case_s, env=env)
    return results


def first_words(step: Step, ranks: int) -> Verdict:
    """What comes of the first words of all ranks, a sum and a message to the next rank; not run if they cannot share
    the GPUs."""

    def speak() -> float:
        group, rank = dist.new_group(range(ranks)), dist.get_rank()
        total, message = (torch.full((4,), float(rank), device=device()) for _ in range(2))
        dist.all_reduce(total, group=group)
        received = torch.empty_like(message)
        ops = [
            dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return total.sum().item() + received.sum().item() - 4 * ((rank - 1) % ranks)

    sums, want = once_on_ranks(step, speak, ranks=ranks, case_s=FIRST_S), 4.0 * sum(range(ranks))
    if not isinstance(sums, tuple):
        return sums == [want] * ranks, {"sums": sums, "wanted": want}
    if 0 < step.devices < ranks:
        how = " ".join(map(str, sums[1].values()))
        return None, {"reason": f"{ranks} ranks cannot share {step.devices} GPU here: {how}"}
    return sums


def refused(step: Step, ranks: int) -> str:
    """Why ranks cannot share the GPUs here, or "": as the step ``nccl`` has found, or else asked now."""
    if not 0 < step.devices < ranks:
        return ""
    file = step.folder / "check.json"
    told = json.loads(file.read_text())["steps"].get("nccl", {}).get("refused") if file.exists() else None
    return first_words(step, ranks)[1].get("reason", "") if told is None else told


def run_on_ranks(
    step: Step,
    each: Callable[[int], Any],
    cases: int,
    *,
    ranks: int,
    case_s: float = CASE_S,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[int, list[Any] | Verdict]]:
    """Call ``each`` with every case's number on every rank, and yield the number with every rank's result, or with what
    stopped the ranks, which is not right; cases the step has no time for are ``OUT_OF_TIME``.

    Args:
        each: returns something JSON can hold.
        env: environment variables of the ranks.
    """
    assert not torch.cuda.is_initialized(), "ranks are forked, which must happen before CUDA is initialised"
    first, in_time = 0, True
    while first < cases and in_time and not step.late:
        last = min(cases, first + AT_ONCE)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, str(rank)) for rank in range(ranks)]
            arguments, ended = (each, range(first, last), files, step.devices, case_s), ""
            try:
                run_ranks(_rank, ranks, args=arguments, timeout=step.left, env=dict(env or {}))
            except RankError as error:  # where the ranks were is for the log
                print(error, flush=True)
                in_time = not isinstance(error, RankTimeout)  # which is the step's cap
                ended = first_failure(error)
            rows = [_results(file) for file in files]
            while first < last and all("result" in of_rank.get(first, ()) for of_rank in rows):
                yield first, [of_rank[first]["result"] for of_rank in rows]
                first += 1
            if in_time and first < last:
                yield first, _reason([of_rank.get(first) for of_rank in rows], files, ended, case_s)
                first += 1
    for case in range(first, cases):
        yield case, (None, {"reason": OUT_OF_TIME})


def _rank(each: Callable[[int], Any], cases: range, files: list[Path], devices: int, case_s: float) -> None:
    rank = int(os.environ["RANK"])
    join(rank, devices, len(files), case_s)
    with files[rank].open("a", buffering=1) as rows, _stacks(files[rank]).open("w") as stacks:
        for case in cases:
            faulthandler.dump_traceback_later(case_s, exit=True, file=stacks)
            try:
                row = {"case": case, "result": each(case)}
            except Exception as error:  # of any library
                row = {"case": case, "stopped": stopped(error), "at": time.time()}
                if case > cases[0]:
                    _wait_for_earlier_cases(case, files, case_s)
                rows.write(json.dumps(row) + "\n")
                raise
            faulthandler.cancel_dump_traceback_later()
            rows.write(json.dumps(row) + "\n")


def _wait_for_earlier_cases(case: int, files: list[Path], case_s: float) -> None:
    """Until every rank has finished the cases before this one: a rank's end stops the others, which may be behind."""
    until = time.monotonic() + case_s
    while time.monotonic() < until and any((case - 1 not in _results(file)) for file in files):
        time.sleep(0.01)


def _results(file: Path) -> dict[int, dict[str, Any]]:
    """Case -> result; without a line that the rank did not finish writing."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return {row["case"]: row for row in map(json.loads, lines)}


def _reason(rows: list[dict[str, Any] | None], files: list[Path], ended: str, case_s: float) -> Verdict:
    """Why a case has no result on every rank: what happened first, since the end of one rank is an error on others."""
    failed = [(row["at"], rank, row["stopped"]) for rank, row in enumerate(rows) if row and "stopped" in row]
    silent = [rank for rank, row in enumerate(rows) if row is None]
    dumps = {
        rank: (stacks.read_text(errors="replace"), stacks.stat().st_mtime)
        for rank in silent
        if (stacks := _stacks(files[rank])).exists() and stacks.stat().st_size
    }
    if failed:
        at, rank, (ok, detail) = min(failed, key=lambda one: one[0])
        if at < min((dumped for _, dumped in dumps.values()), default=float("inf")):
            return ok, {name: f"rank {rank}: {text}" for name, text in detail.items()}
    compiling = [rank for rank, (text, _) in dumps.items() if any(path in text for path in COMPILING)]
    if compiling:
        return None, {"reason": f"ranks {compiling} were still compiling or autotuning kernels after {case_s:g} s"}
    where = "; ".join(f"rank {rank} in {place}" for rank, (text, _) in dumps.items() if (place := _innermost(text)))
    return False, {"failure": f"ranks {silent} did not finish within {case_s:g} s; {where or ended}"}


def _stacks(file: Path) -> Path:
    return file.with_suffix(".stacks")


def _innermost(text: str) -> str:
    """The innermost place in our code, if there is one, in the stacks that ``faulthandler`` wrote."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', text)
    ours = [frame for frame in frames if "/torch/" not in frame[0] and "/threading.py" not in frame[0]]
    if not frames:
        return ""
    file, line, function = (ours or frames)[0]
    return f"{function} ({os.path.basename(file)}:{line})"


def first_failure(error: RankError) -> str:
    """In one line."""
    return f"rank {error.rank}: {(error.traceback.strip().splitlines() or ['no traceback'])[-1]}"


def join(rank: int, devices: int, ranks: int, timeout_s: float) -> None:
    """Initialise as Megatron does: without ``device_id``, so that communicators are created at their first message."""
    timeout = timedelta(seconds=timeout_s)
    if not devices:
        dist.init_process_group("gloo", timeout=timeout)
        return
    if devices < ranks:
        os.environ.update(shared_gpu(rank))
    torch.cuda.set_device(rank % devices)
    dist.init_process_group("nccl", timeout=timeout)


def shared_gpu(rank: int) -> dict[str, str]:
    """Environment of NCCL for ranks that share a GPU: each as if on a host of its own, over the loopback interface."""
    over_loopback = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    return {"NCCL_HOSTID": str(rank)} | over_loopback


def device() -> torch.device:
    """This rank's device, after ``join``."""
    on_cpu = dist.get_backend() == "gloo"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
