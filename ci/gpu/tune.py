"""With ``--tune``: block sizes of the attention kernels that might be faster than those in ``cp_kernels.sizes``.

First every candidate is compiled, in processes beside each other, into Triton's cache; then they are timed in turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from cases import lacking
from record import Found, Row, Step, found_by
from spread import spread
from timing import medians


class Heads(NamedTuple):
    """Head sizes of keys and values, and how many tokens are attended to."""

    d: int
    e: int
    tokens: int
    count: int = 16


class Trial(NamedTuple):
    """One kernel with one choice: queries, keys, warps, blocks under way."""

    kernel: str
    heads: Heads
    sizes: tuple[int, int, int, int]


KERNELS = ("forward", "dq", "dkv")
HEADS = (Heads(128, 128, 16384), Heads(192, 128, 16384), Heads(64, 64, 16384), Heads(256, 256, 16384))
CANDIDATES = (
    *((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)),
    *((128, 32, 4, 3), (128, 32, 8, 3), (64, 128, 4, 2), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
    *((64, 64, 8, 2), (64, 32, 4, 3), (32, 64, 4, 3), (32, 128, 8, 2)),
)


def main() -> None:
    with Step("tune") as step:
        if reason := lacking("triton", step.device):
            step.not_run("block sizes", reason)
            return
        every = (Heads(16, 16, 64, 2),) if step.smoke else HEADS
        for heads in every:
            trials = [
                Trial(kernel, heads, sizes) for kernel in KERNELS for sizes in _candidates(kernel, heads, step.smoke)
            ]
            usable = compiled(step, trials)
            for kernel in KERNELS:
                compare(step, [trial for trial in usable if trial.kernel == kernel])


def _candidates(kernel: str, heads: Heads, smoke: bool) -> list[tuple[int, int, int, int]]:
    """The present choice first."""
    now = present(kernel, heads)
    others = ((16, 16, 4, 1),) if smoke else CANDIDATES
    return [now, *(sizes for sizes in others if sizes != now)]


def present(kernel: str, heads: Heads) -> tuple[int, int, int, int]:
    from cp_kernels import sizes

    return tuple(getattr(sizes, f"{kernel}_sizes")(heads.d, heads.e, torch.bfloat16))


def compiled(step: Step, trials: list[Trial]) -> list[Trial]:
    """Those that compile and fit the device."""
    usable = []
    for trial, rows in spread(attempt, trials, here=step.smoke, seconds=step.left):
        if isinstance(rows, str):
            step.not_run(described(trial), rows)
        elif rows[0][2]:
            usable.append(trial)
        else:
            step.not_run(described(trial), rows[0][3]["failure"])
    return sorted(usable, key=trials.index)


def described(trial: Trial) -> str:
    queries, keys, warps, stages = trial.sizes
    heads = f"{trial.heads.d}/{trial.heads.e}"
    return f"{trial.kernel}, heads of {heads}: {queries} x {keys}, {warps} warps, {stages} stages"


def attempt(trial: Trial) -> list[Row]:
    """Run it once, on few tokens, for its code alone."""
    few = trial._replace(heads=trial.heads._replace(tokens=min(trial.heads.tokens, 256)))
    with chosen(trial):
        return [("block sizes", described(trial), *found_by(lambda: runs(few)))]


def runs(trial: Trial) -> Found:
    forward, backward = calls(trial.heads)
    (forward if trial.kernel == "forward" else backward)()
    return True, {}


def compare(step: Step, trials: list[Trial]) -> None:
    """The best beside the present choice; the backward is timed whole, with one of its two kernels changed."""
    if not trials or step.late:
        return
    heads, kernel = trials[0].heads, trials[0].kernel
    forward, backward = calls(heads)
    run = forward if kernel == "forward" else backward

    def with_sizes(trial: Trial) -> object:
        with chosen(trial):
            return run()

    times = medians(
        {described(trial): lambda trial=trial: with_sizes(trial) for trial in trials}, 1 if step.smoke else 5, warm_up=1
    )
    now = described(Trial(kernel, heads, present(kernel, heads)))
    best = min(times, key=lambda name: times[name])
    detail = {"best": best, "ms": times[best], "present": now, "present ms": times.get(now, 0.0)}
    name = f"{kernel}, heads of {heads.d}/{heads.e}"
    step.figure(
        "time of the best block sizes over the present ones", name, times[best] / times.get(now, times[best]), **detail
    )


def calls(heads: Heads):
    """A causal forward and a backward of so many tokens."""
    from cp_kernels.backward import backward
    from cp_kernels.forward import forward
    from cp_kernels.visible import View

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, view, scale = (range(heads.tokens),), View(right=0), heads.d**-0.5
    shapes = [(heads.tokens, 1, heads.count, size) for size in (heads.d, heads.d, heads.e, heads.e)]
    q, k, v, dout = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
    out, lse = forward(q, k, v, rows, rows, view, scale)
    delta = (dout.float() * out.float()).sum(-1)
    return (
        lambda: forward(q, k, v, rows, rows, view, scale),
        lambda: backward(dout, q, k, v, lse, delta, rows, rows, view, scale),
    )


@contextmanager
def chosen(trial: Trial) -> Iterator[None]:
    """Inside, one kernel has other block sizes."""
    import cp_kernels.backward
    import cp_kernels.forward
    from cp_kernels.sizes import Sizes

    module = cp_kernels.forward if trial.kernel == "forward" else cp_kernels.backward
    name = f"{trial.kernel}_sizes"
    usual = getattr(module, name)
    setattr(module, name, lambda *_: Sizes(*trial.sizes))
    try:
        yield
    finally:
        setattr(module, name, usual)


if __name__ == "__main__":
    main()
