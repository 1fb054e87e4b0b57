"""``--tune``: block sizes of the attention kernels that may be faster than those in ``cp_kernels.sizes``.

All candidates are compiled first, in parallel processes, into Triton's cache, and then timed in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from cases import kernel, lacking
from record import Call, Found, Row, Step, found_by, medians
from spread import spread


class Heads(NamedTuple):
    """Head sizes of keys and values, number of tokens and heads."""

    d: int
    e: int
    tokens: int
    count: int = 16


class Trial(NamedTuple):
    """One kernel with block sizes: queries, keys, warps, pipeline stages."""

    kernel: str
    heads: Heads
    sizes: tuple[int, int, int, int]

    def __str__(self) -> str:
        queries, keys, warps, stages = self.sizes
        heads = f"{self.heads.d}/{self.heads.e}"
        return f"{self.kernel}, heads of {heads}: {queries} x {keys}, {warps} warps, {stages} stages"


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
        candidates = ((16, 16, 4, 1),) if step.smoke else CANDIDATES
        for heads in (Heads(16, 16, 64, 2),) if step.smoke else HEADS:
            now = {kernel: present(kernel, heads) for kernel in KERNELS}
            trials = [Trial(k, heads, sizes) for k in KERNELS for sizes in dict.fromkeys((now[k], *candidates))]
            usable = compiled(step, trials)
            for kernel in KERNELS:
                compare(step, [t for t in usable if t.kernel == kernel], str(Trial(kernel, heads, now[kernel])))


def present(kernel: str, heads: Heads) -> tuple[int, int, int, int]:
    """The current block sizes."""
    from cp_kernels import sizes

    on = sizes.gpu(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return tuple(getattr(sizes, f"{kernel}_sizes")(heads.d, heads.e, torch.bfloat16, on))


def compiled(step: Step, trials: list[Trial]) -> list[Trial]:
    """The trials that compile and fit the device."""
    usable = []
    for trial, (*_, ok, detail) in spread(attempt, trials, here=step.smoke, seconds=step.left):
        if ok:
            usable.append(trial)
        else:
            step.not_run(str(trial), detail["reason" if ok is None else "failure"])
    return sorted(usable, key=trials.index)


def attempt(trial: Trial) -> Iterator[Row]:
    """Compile it by running it on few tokens."""

    def run() -> Found:
        few = trial.heads._replace(tokens=min(trial.heads.tokens, 256))
        forward, backward = calls(few)
        (forward if trial.kernel == "forward" else backward)()
        return True, {}

    with chosen(trial):
        yield ("block sizes", str(trial), *found_by(run))


def compare(step: Step, trials: list[Trial], now: str) -> None:
    """The best sizes against the present ones; a backward is timed with one of its two kernels changed."""
    if not trials or step.late:
        return
    heads, which = trials[0].heads, trials[0].kernel
    forward, backward = calls(heads)

    def timed(trial: Trial) -> Call:
        def call() -> None:
            with chosen(trial):
                (forward if which == "forward" else backward)()

        return call

    times = medians({str(trial): timed(trial) for trial in trials}, 1 if step.smoke else 5, warm_up=1)
    best = min(times, key=lambda name: times[name])
    detail = {"best": best, "ms": times[best], "present": now, "present ms": times.get(now, 0.0)}
    ratio = times[best] / times.get(now, times[best])
    what = f"{which}, heads of {heads.d}/{heads.e}"
    of = (kernel("triton", heads.d, heads.e),)
    step.figure("time of the best block sizes over the present ones", what, ratio, of=of, **detail)


def calls(heads: Heads) -> tuple[Call, Call]:
    """A causal forward and a backward."""
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
    """Use other block sizes for one kernel."""
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
