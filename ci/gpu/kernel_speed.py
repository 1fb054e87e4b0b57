"""Speed of attention kernels on one block: ours against the libraries', and shapes that libraries lack."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import brute
import torch
from cases import ONLY_A_REFERENCE, lacking, possible
from cases import kernel as kernel_of
from record import Call, Found, Step, in_a_line, medians, worst
from torch import Tensor

from cp_plugin.engine.attention.calls import Inputs
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import CAUSAL
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import tiles
from cp_plugin.engine.core.values import KeyValues, Partial, Queries
from cp_plugin.engine.kernels import backends
from cp_plugin.engine.kernels.blocks import kernel

FORWARD, BACKWARD = 0.75, 0.65
"""Targets of our speed over that of torch's flash attention."""
STRICTLY = 1.03
"""Upper target of the time of a strictly causal tile over a causal one."""
STAIRCASE = 1.3
"""Target of the speed of one staircase launch over its split into causal tiles."""
FP8 = 1.4
"""Target of the speed of a forward pass in FP8 over bfloat16."""


CHECKED = 64
"""Rows at the end of a timed tile whose results are checked."""


class Size(NamedTuple):
    """Size of the timed attention."""

    tokens: int
    heads: int = 16
    head_dim: int = 128
    rounds: int = 5
    v_head_dim: int = 128

    def __str__(self) -> str:
        tokens = f"{self.tokens // 1024}k tokens" if self.tokens >= 1024 else f"{self.tokens} tokens"
        return f"{tokens}, heads of {self.head_dim}/{self.v_head_dim}"

    def problem(self, ranks: int = 1) -> Problem:
        return Problem(
            size=ranks,
            seq_length=self.tokens,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
        )

    def of(self, *backends: str) -> tuple[str, ...]:
        """The kernels of these backends, for ``of``."""
        return tuple(kernel_of(backend, self.head_dim, self.v_head_dim) for backend in backends)


class Timed:
    """Attention of one block with one kernel."""

    def __init__(self, backend: str, size: Size, rows: Segments, keys: Segments, device: torch.device) -> None:
        self.kernel = kernel(backends.get(backend), size.problem(), device, auto=False)
        self.block = Block(rows, keys, CAUSAL, Scores(size.head_dim**-0.5))
        self.x = random(size, sum(map(len, rows)), sum(map(len, keys)), device)

    def attend(self, onto: Partial | None = None) -> Partial | None:
        q, k, v, *_ = self.x
        return self.kernel.forward(Queries(q), KeyValues(k, v), self.block, onto)

    def forward(self) -> tuple[Tensor, Tensor]:
        found = self.attend()
        assert found is not None
        return found

    def backward(self) -> Call:
        """A call of the backward pass; the forward pass runs beforehand."""
        q, k, v, dout, *_ = self.x
        out, lse = self.forward()
        delta = (dout.float() * out.float()).sum(-1)
        queries, kv = Queries(q, dout, lse, delta), KeyValues(k, v)
        return lambda: self.kernel.backward(queries, kv, self.block)


def random(size: Size, rows: int, keys: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    d, e = size.head_dim, size.v_head_dim
    shapes = [(n, 1, size.heads, width) for n, width in ((rows, d), (keys, d), (keys, e), (rows, e))]
    return Inputs(*(torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes))


def floating_point_operations(block: Block, size: Size) -> float:
    """Of the forward pass: two products per visible pair; the backward pass has five."""
    pairs = sum(tile.pairs for tile in tiles(*block.area))
    return 2.0 * pairs * size.heads * (size.head_dim + size.v_head_dim)


def last_rows(timed: Timed) -> Found:
    """The results of a causal tile's last queries and keys against float64: no others see these keys."""
    q, k, v, dout, *_ = timed.x
    out, _ = timed.forward()
    dq, dk, dv = timed.backward()()
    n = min(CHECKED, len(q))
    keys = range(len(k))
    few = brute.Inputs(q[-n:], k, v, dout[-n:])
    want = brute.answer(few, (keys[-n:],), (keys,), brute.View(right=0), timed.block.scores.scale)
    got = {"out": out[-n:], "dq": dq[-n:], "dk": dk[-n:], "dv": dv[-n:]}
    errors = {}
    for name, x in got.items():
        right = getattr(want, name)[-n:]
        errors[name] = ((x.double() - right).norm() / right.norm()).item()
    return worst(errors, dict.fromkeys(errors, brute.LIMITS[torch.bfloat16]))


def whole_tiles(step: Step, size: Size) -> None:
    """A causal tile, forward and backward, with every available kernel."""
    rows = (range(size.tokens),)
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    for name in possible(step.device):
        if name in ("auto", "reference", "float8"):
            continue
        if reason := lacking(name, step.device, size.problem()):
            step.not_run(f"speed of backend {name}, {size}", reason)
            continue
        try:
            one = Timed(name, size, rows, rows, step.device)
            back = one.backward()
            back()
        except Exception as error:  # of any library
            step.not_run(f"speed of backend {name}, {size}", in_a_line(error))
            continue
        forward[name], backward[name] = one.forward, back
        if name != "te_fp8":  # the step providers knows the error of FP8
            step.attempt("timed attention, last rows", f"{name}, {size}", partial(last_rows, one), size.of(name))
    work = floating_point_operations(Block(rows, rows, CAUSAL), size)
    for phase, calls, operations, wanted in (
        ("forward", forward, work, FORWARD),
        ("backward", backward, 2.5 * work, BACKWARD),
    ):
        times = medians(calls, size.rounds)
        speed = {name: operations / ms / 1e9 for name, ms in times.items()}
        for name in times:
            detail = {"ms": times[name], "TFLOP/s": speed[name], "flash ms": times["sdpa"]}
            least = (">=", wanted) if name == "triton" else None
            group, what = "speed over torch's flash attention", f"{name}, {phase}, {size}"
            step.figure(group, what, times["sdpa"] / times[name], least, size.of(name), **detail)
        if "te_fp8" in times and phase == "forward":
            half = "te" if "te" in times else "sdpa"
            detail = {"ms": times["te_fp8"], "TFLOP/s": speed["te_fp8"], "bfloat16 ms": times[half]}
            ratio = times[half] / times["te_fp8"]
            title, of = f"speed of FP8 over bfloat16 of backend {half}", size.of("te_fp8")
            step.figure(title, f"forward, {size}", ratio, (">=", FP8), of, **detail)


def strictly_causal(step: Step, size: Size) -> None:
    """A tile in which a query does not see the key of its own index."""
    n = 2 * size.tokens
    odd, even = (range(1, n, 2),), (range(0, n, 2),)
    calls = {
        "causal": Timed("triton", size, odd, even, step.device).forward,
        "strictly": Timed("triton", size, even, odd, step.device).forward,
    }
    times = medians(calls, 2 * size.rounds)
    detail = {"ms": times["strictly"], "causal ms": times["causal"]}
    ratio = times["strictly"] / times["causal"]
    title, wanted = "time of a strictly causal tile over a causal one", ("<=", STRICTLY)
    step.figure(title, f"{size}", ratio, wanted, size.of("triton"), **detail)


def several_tiles(step: Step, size: Size, libraries: list[str]) -> None:
    """Queries of a larger step than the keys, as on rectangular grids: one launch of ours against one per tile, by our
    kernel, which accumulates, and by libraries, whose results are merged."""
    for count in (2,) if step.smoke else (2, 4, 8):
        rows, keys = (range(count - 1, count * size.tokens, count),), (range(count * size.tokens),)
        ours = Timed("triton", size, rows, keys, step.device)
        parts = [Timed("triton", size, rows, (keys[0][i::count],), step.device) for i in range(count)]

        def one_by_one(parts: list[Timed] = parts) -> None:
            onto = None
            for part in parts:
                onto = part.attend(onto)

        split = {name: Timed(name, size, rows, keys, step.device) for name in libraries}
        calls: dict[str, dict[str, Call]] = {
            "forward": {"one": ours.forward, "triton": one_by_one}
            | {name: timed.forward for name, timed in split.items()},
            "backward": {"one": ours.backward()} | {name: timed.backward() for name, timed in split.items()},
        }
        for phase, of_phase in calls.items():
            times = medians(of_phase, size.rounds)
            for name in list(times)[1:]:
                wanted = (">=", STAIRCASE) if (name, phase) == ("sdpa", "forward") and count < 8 else None
                detail = {"ms": times["one"], "split ms": times[name]}
                what = f"{count} tiles of {size}, {phase}: {name}"
                title, of = "speed of one staircase launch over its tiles", size.of("triton", name)
                step.figure(title, what, times[name] / times["one"], wanted, of, **detail)


def row_terms(step: Step, size: Size, libraries: list[str]) -> None:
    """Time of the row term that libraries need besides lse, over that of a backward pass of one tile."""
    rows = (range(size.tokens),)
    for name in libraries:
        one = Timed(name, size, rows, (range(-size.tokens, 0),), step.device)
        out, _ = one.forward()
        delta = (one.x.dout.float() * out.float()).sum(-1)
        calls: dict[str, Call] = {
            "row term": lambda name=name, one=one, delta=delta: backends.get(name).row_term(one.x.dout, delta),
            "backward": one.backward(),
        }
        times = medians(calls, 2 * size.rounds)
        detail = {"ms": times["row term"], "backward ms": times["backward"]}
        ratio = times["row term"] / times["backward"]
        title, of = "time of the row term over a backward's", size.of(name)
        step.figure(title, f"{name}, a full tile of {size}", ratio, of=of, **detail)


def kernels(step: Step, first: Size, later: list[Size]) -> dict[str, Call]:
    """What is timed, by name: everything for the first size, whole tiles for the later ones."""
    step.not_run("speed of backend reference", ONLY_A_REFERENCE)
    step.not_run("speed of backend float8", "it is FP8's numerics in plain torch, not a kernel")
    usable = [name for name, reason in possible(step.device).items() if not reason]
    libraries = [name for name in usable if name in ("sdpa", "cudnn", "flash", "te")]
    parts: dict[str, Call] = {}
    for size in (first, *later):
        parts[f"speed of attention, {size}"] = partial(whole_tiles, step, size)
    if "triton" in usable:
        parts[f"several tiles of {first}"] = partial(several_tiles, step, first, libraries)
        parts[f"a strictly causal tile of {first}"] = partial(strictly_causal, step, first)
    else:
        step.not_run("staircases and strictly causal tiles", possible(step.device)["triton"])
    parts[f"the row term, {first}"] = partial(row_terms, step, first, libraries)
    return parts
