"""Step 4: providers over real process groups, a process and a GPU for each rank: correctness, and what is not hidden.

The time of a call that is not computation is its time over NCCL less that of the same rank alone (``alone``), whose
messages take no time. The smoke test has Gloo in the place of NCCL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from alone import rank_of
from attend import Inputs, answer, attend, inputs, limits, relative
from cases import Shape, Sort, problem_of
from record import Step, finite, in_a_line

from cp_plugin import ContextParallel, providers
from cp_plugin.launch import run_ranks

MOST = 8
CHECKED = Shape(0, 1024, 16, 8, 128, 128, torch.bfloat16)
TIMED = Shape(0, 65536, 16, 8, 128, 128, torch.bfloat16)
TINY = Shape(2, 32, 2, 2, 16, 16, torch.float32)
ROUNDS = 5


def main() -> None:
    with Step("ranks") as step:
        devices = 2 if step.smoke else torch.cuda.device_count()
        if devices < 2:
            step.not_run("providers over NCCL", "there is one GPU, and NCCL wants one for each rank")
            return
        size = min(MOST, 1 << (devices.bit_length() - 1))
        names = ["ring", "all_gather"] if step.smoke else providers.names()
        checked, timed = (TINY if step.smoke else shape._replace(size=size) for shape in (CHECKED, TIMED))
        found = run_ranks(
            lambda: [one(name, checked, timed) for name in names],
            size,
            init_process_group=step.smoke,
            timeout=max(10.0, step.left),
        )[0]
        library = "Gloo" if step.smoke else "NCCL"
        for name, result in zip(names, found, strict=True):
            if isinstance(result, str):
                step.check(f"over {library}, {size} ranks", name, False, failure=result)
                continue
            errors, most, ms, alone = result
            worst = max(errors, key=lambda tensor: errors[tensor] / max(most[tensor], 1e-30))
            detail = {"tensor": worst, "error": finite(errors[worst]), "limit": finite(most[worst])}
            ok = all(errors[tensor] <= most[tensor] for tensor in errors)
            step.check(f"over {library}, {size} ranks", f"{name}, {checked}", ok, **detail)
            detail = {"ms": ms, "computation ms": alone}
            what = f"{name}, {timed.tokens} tokens, {size} ranks"
            step.figure(f"share of the time that {library} is waited for", what, 1 - alone / ms, None, **detail)


def one(name: str, checked: Shape, timed: Shape) -> Any:
    """Errors, their limits, and milliseconds with and without messages; or what stopped it."""
    try:
        device = here()
        errors, most = correct(name, checked, device)
        return errors, most, *times(name, timed, device)
    except Exception as error:  # of any library
        return in_a_line(error)


def here() -> torch.device:
    """This rank's device; on CUDA it joins the others first."""
    if dist.is_initialized() and dist.get_backend() == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl", device_id=device)
    return device


def made(name: str, shape: Shape) -> ContextParallel:
    return ContextParallel(name, group=dist.group.WORLD, problem=problem_of(shape, Sort()))


def correct(name: str, shape: Shape, device: torch.device) -> tuple[dict[str, float], dict[str, float]]:
    cp = made(name, shape)
    shards = Inputs(*(cp.shard(x) for x in inputs(shape, device)))
    got = tuple(cp.unshard(x) for x in attend(cp, shards, Sort()))
    return relative(got, answer(shape, Sort(), device)), limits(shape, Sort(), "auto", None, device)


def times(name: str, shape: Shape, device: torch.device) -> tuple[float, float]:
    """Milliseconds of forward and backward over the group, and of this rank alone."""
    cp = made(name, shape)
    alone = rank_of(name, shape, Sort(), "auto", device, index=dist.get_rank())
    return median(lambda: attend(cp, alone.x, Sort())), median(alone)


def median(call: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS + 1):  # the first one warms up
        dist.barrier()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return sorted(found[1:])[ROUNDS // 2]


def synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
