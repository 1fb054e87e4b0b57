"""``--tune``: block sizes of the attention kernels that may be faster than those in ``cp_kernels.sizes``.

All candidates are compiled first, in parallel processes, into Triton's cache, and then timed in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from cases import lacking
from kernel_speed import Size, Timed
from record import Found, Row, Step, found_by, medians
from spread import spread

SIZES = (Size(16384), Size(16384, head_dim=192), Size(16384, head_dim=64, v_head_dim=64))
SIZES += (Size(16384, head_dim=256, v_head_dim=256),)
SMALL = Size(64, 2, 16, 1, 16)
CANDIDATES = (
    *((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
    *((128, 32, 4, 3), (128, 32, 8, 3), (64, 128, 4, 2), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
    *((64, 64, 8, 2), (64, 32, 4, 3), (32, 64, 4, 3), (32, 128, 8, 2)),
)


class Trial(NamedTuple):
    """One kernel with block sizes: queries, keys, warps, pipeline stages."""

    kernel: str
    """``forward``, ``dq`` or ``dkv``."""
    size: Size
    blocks: tuple[int, int, int, int]

    def __str__(self) -> str:
        queries, keys, warps, stages = self.blocks
        return f"{self.kernel}, {self.size}: {queries} x {keys}, {warps} warps, {stages} stages"

    @property
    def chosen(self) -> Any:
        """A context in which the kernel has these blocks."""
        from cp_kernels.sizes import Sizes

        module = "forward" if self.kernel == "forward" else "backward"
        return patch(f"cp_kernels.{module}.{self.kernel}_sizes", lambda *_: Sizes(*self.blocks))


def main() -> None:
    with Step("tune") as step:
        if reason := lacking("triton", step.device):
            step.not_run("block sizes", reason)
            return
        candidates = ((16, 16, 4, 1),) if step.smoke else CANDIDATES
        for size in (SMALL,) if step.smoke else SIZES:
            now = {kernel: Trial(kernel, size, present(kernel, size)) for kernel in ("forward", "dq", "dkv")}
            trials = [t._replace(blocks=b) for t in now.values() for b in dict.fromkeys((t.blocks, *candidates))]
            usable = []
            for trial, (*_, ok, detail) in spread(attempt, trials, here=step.smoke, seconds=step.left):
                if ok:
                    usable.append(trial)
                else:
                    step.not_run(str(trial), detail["reason" if ok is None else "failure"])
            for kernel in now:
                compare(step, [t for t in trials if t in usable and t.kernel == kernel], str(now[kernel]))


def present(kernel: str, size: Size) -> tuple[int, int, int, int]:
    """The current block sizes."""
    from cp_kernels import sizes

    on = sizes.gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return tuple(getattr(sizes, f"{kernel}_sizes")(size.head_dim, size.v_head_dim, torch.bfloat16, on))


def attempt(trial: Trial) -> Iterator[Row]:
    """Compile it by running it on few tokens."""

    def run() -> Found:
        call(trial._replace(size=trial.size._replace(tokens=min(trial.size.tokens, 256))))()
        return True, {}

    yield ("block sizes", str(trial), *found_by(run))


def call(trial: Trial) -> Any:
    """A causal forward, or a backward with one of its two kernels changed."""
    rows, device = (range(trial.size.tokens),), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timed = Timed("triton", trial.size, rows, rows, device)
    return trial.chosen(timed.forward if trial.kernel == "forward" else timed.backward())


def compare(step: Step, trials: list[Trial], now: str) -> None:
    """The best sizes against the present ones."""
    if not trials or step.late:
        return
    times = medians({str(trial): call(trial) for trial in trials}, 1 if step.smoke else 5, warm_up=1)
    best = min(times, key=lambda name: times[name])
    detail = {"best": best, "ms": times[best], "present": now, "present ms": times.get(now, 0.0)}
    ratio, (kernel, size, _) = times[best] / times.get(now, times[best]), trials[0]
    title = "time of the best block sizes over the present ones"
    step.figure(title, f"{kernel}, {size}", ratio, of=size.of("triton"), **detail)


if __name__ == "__main__":
    main()
