"""Speed, as ratios of times taken in turn. Nothing here fails the check but the last rows of a timed tile.

attention kernels    one block: ours against the libraries', and shapes that libraries lack
memory-bound kernels their bandwidth over that of a device copy: merging, permuting, packing; decode's attention
methods              one big call of torch's flash attention over all ranks of a method together, as threads of one
                     device whose messages are copies: 1 would mean that tiles, merges and moves are free
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import brute
import operations
import torch
from cases import ONLY_A_REFERENCE, attend, kernel, lacking, normal, possible, timed_parts
from oracle import relative_error
from record import Call, Step, Verdict, medians, one_line, worst
from torch import Tensor

from cp_plugin import ContextParallel, Options
from cp_plugin.engine.attention.calls import Inputs, Setup, settled
from cp_plugin.engine.comm import Mesh, run_threads
from cp_plugin.engine.core.block import Block, Scores
from cp_plugin.engine.core.layout import Segments
from cp_plugin.engine.core.mask import CAUSAL
from cp_plugin.engine.core.problem import Problem
from cp_plugin.engine.core.tiles import tiles
from cp_plugin.engine.core.values import KeyValues, Partial, Queries
from cp_plugin.engine.inference import store
from cp_plugin.engine.kernels import backends, blocks
from cp_plugin.engine.methods import registry as providers

FORWARD, BACKWARD = 0.75, 0.65
"""Targets of our speed over that of torch's flash attention."""
STRICTLY = 1.03
"""Upper target of the time of a strictly causal tile over a causal one."""
STAIRCASE = 1.3
"""Target of the speed of one staircase launch over its split into causal tiles."""
FP8 = 1.4
"""Target of the speed of a forward pass in FP8 over bfloat16."""
LARGE = Problem(size=1, seq_length=16384, heads=16, kv_heads=16)
TINY = Problem(size=1, seq_length=64, heads=2, kv_heads=2, head_dim=16)
CHECKED = 64
"""Rows at the end of a timed tile whose results are checked."""
BANDWIDTH = 0.8
"""Target for merging and permuting, over a copy."""
BLOCK = 64
"""Tokens that share an exponent."""
METHODS = (
    ("ring", "zigzag", 0.90),
    ("striped", "striped", 0.83),
    ("attention2d", "zigzag", 0.92),
    ("burst", "zigzag", None),
    ("ulysses", "contiguous", None),
    ("usp", "zigzag", None),
    ("all_gather", "zigzag", None),
)
"""Provider, layout, and target with ``--cp-backend auto``: what ring-flash-attention publishes for rings, and more for
attention2d."""


def performance(step: Step) -> None:
    first = TINY if step.smoke else LARGE
    later = [replace(first, head_dim=64, v_head_dim=64), replace(first, head_dim=192)]
    long = [replace(first, seq_length=65536)]
    if step.smoke:
        later, long = [replace(first, head_dim=32)], []

    def measure(name: str, call: Callable[..., None], *arguments: Any) -> None:
        step.measure(name, partial(call, step, *arguments))
        if step.device.type == "cuda":
            torch.cuda.empty_cache()

    step.not_run("speed of backend reference", ONLY_A_REFERENCE)
    step.not_run("speed of backend float8", "it is FP8's numerics in plain torch, not a kernel")
    usable = [name for name, reason in possible(step.device).items() if not reason]
    libraries = [name for name in usable if name in ("sdpa", "cudnn", "flash", "te")]
    for problem in (first, *later):
        measure(f"speed of attention, {describe(problem)}", whole_tiles, problem)
    if "triton" in usable:
        measure(f"several tiles of {describe(first)}", several_tiles, first, libraries)
        measure(f"a strictly causal tile of {describe(first)}", strictly_causal, first)
    else:
        step.not_run("staircases and strictly causal tiles", possible(step.device)["triton"])
    measure(f"the row term, {describe(first)}", row_terms, first, libraries)
    measure("bandwidth of our kernels", memory_bound)
    measure("bandwidth of decode", decode)
    for problem in long:
        measure(f"speed of attention, {describe(problem)}", whole_tiles, problem)
    for backend in ("sdpa", "triton", "auto"):  # a library of auto may build plans for every rank and shape
        for problem in (first, *long):
            name = f"efficiency of methods with backend {backend}, {describe(problem)}"
            measure(name, methods, problem, 2 if step.smoke else 8, backend)


def describe(problem: Problem) -> str:
    n = problem.seq_length
    tokens = f"{n // 1024}k tokens" if n >= 1024 else f"{n} tokens"
    return f"{tokens}, heads of {problem.head_dim}/{problem.v_head_dim}"


def kernels(problem: Problem, *backends: str) -> tuple[str, ...]:
    """The kernels of these backends, for ``of``."""
    return tuple(kernel(backend, problem.head_dim, problem.v_head_dim) for backend in backends)


def rounds(step: Step) -> int:
    return 1 if step.smoke else 5


class Timed:
    """Attention of one block with one kernel."""

    def __init__(self, backend: str, problem: Problem, rows: Segments, keys: Segments, device: torch.device) -> None:
        self.kernel = blocks.kernel(backends.get(backend), problem, device, auto=False)
        self.block = Block(rows, keys, CAUSAL, Scores(problem.head_dim**-0.5))
        self.x = random(problem, sum(map(len, rows)), sum(map(len, keys)), device)

    def attend(self, onto: Partial | None = None) -> Partial | None:
        q, k, v, *_ = self.x
        return self.kernel.forward(Queries(q), KeyValues(k, v), self.block, onto)

    def forward(self) -> tuple[Tensor, Tensor]:
        whole = self.attend()
        assert whole is not None
        return whole

    def backward(self) -> Call:
        """A call of the backward pass; the forward pass runs beforehand."""
        q, k, v, dout, *_ = self.x
        out, lse = self.forward()
        delta = (dout.float() * out.float()).sum(-1)
        queries, kv = Queries(q, dout, lse, delta), KeyValues(k, v)
        return lambda: self.kernel.backward(queries, kv, self.block)


def random(problem: Problem, rows: int, keys: int, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    d, e = problem.head_dim, problem.v_head_dim
    shapes = [(n, 1, problem.heads, width) for n, width in ((rows, d), (keys, d), (keys, e), (rows, e))]
    return Inputs(*(torch.randn(shape, generator=generator, device=device).bfloat16() for shape in shapes))


def floating_point_operations(block: Block, problem: Problem) -> float:
    """Of the forward pass: two products per visible pair; the backward pass has five."""
    pairs = sum(tile.pairs for tile in tiles(*block.area))
    return 2.0 * pairs * problem.heads * (problem.head_dim + problem.v_head_dim)


def check_last_rows(timed: Timed) -> Verdict:
    """The results of a causal tile's last queries and keys against float64: no others see these keys."""
    q, k, v, dout, *_ = timed.x
    out, _ = timed.forward()
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *timed.backward()()), strict=True))
    n, keys = min(CHECKED, len(q)), range(len(k))
    few = brute.Inputs(q[-n:], k, v, dout[-n:])
    want = brute.answer(few, (keys[-n:],), (keys,), brute.View(right=0), timed.block.scores.scale)
    errors = {name: relative_error(x[-n:], getattr(want, name)[-n:]) for name, x in got.items()}
    return worst(errors, dict.fromkeys(errors, brute.LIMITS[torch.bfloat16]))


def whole_tiles(step: Step, problem: Problem) -> None:
    """A causal tile, forward and backward, with every available kernel."""
    rows = (range(problem.seq_length),)
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    for name in possible(step.device):
        if name in ("auto", "reference", "float8"):
            continue
        if reason := lacking(name, step.device, problem):
            step.not_run(f"speed of backend {name}, {describe(problem)}", reason)
            continue
        try:
            one = Timed(name, problem, rows, rows, step.device)
            back = one.backward()
            back()
        except Exception as error:  # of any library
            step.not_run(f"speed of backend {name}, {describe(problem)}", one_line(error))
            continue
        forward[name], backward[name] = one.forward, back
        if name != "te_fp8":  # the step providers knows the error of FP8
            step.attempt(
                "timed attention, last rows",
                f"{name}, {describe(problem)}",
                partial(check_last_rows, one),
                kernels(problem, name),
            )
    work = floating_point_operations(Block(rows, rows, CAUSAL), problem)
    for phase, calls, passes, wanted in (
        ("forward", forward, 1.0, FORWARD),
        ("backward", backward, 2.5, BACKWARD),
    ):
        times = medians(calls, rounds(step))
        speed = {name: passes * work / ms / 1e9 for name, ms in times.items()}
        for name in times:
            detail = {"ms": times[name], "TFLOP/s": speed[name], "flash ms": times["sdpa"]}
            least = (">=", wanted) if name == "triton" else None
            group, what = "speed over torch's flash attention", f"{name}, {phase}, {describe(problem)}"
            step.figure(group, what, times["sdpa"] / times[name], least, kernels(problem, name), **detail)
        if "te_fp8" in times and phase == "forward":
            half = "te" if "te" in times else "sdpa"
            detail = {"ms": times["te_fp8"], "TFLOP/s": speed["te_fp8"], "bfloat16 ms": times[half]}
            ratio = times[half] / times["te_fp8"]
            title, of = f"speed of FP8 over bfloat16 of backend {half}", kernels(problem, "te_fp8")
            step.figure(title, f"forward, {describe(problem)}", ratio, (">=", FP8), of, **detail)


def strictly_causal(step: Step, problem: Problem) -> None:
    """A tile in which a query does not see the key of its own index."""
    n = 2 * problem.seq_length
    odd, even = (range(1, n, 2),), (range(0, n, 2),)
    calls = {
        "causal": Timed("triton", problem, odd, even, step.device).forward,
        "strictly": Timed("triton", problem, even, odd, step.device).forward,
    }
    times = medians(calls, 2 * rounds(step))
    detail = {"ms": times["strictly"], "causal ms": times["causal"]}
    title, wanted, of = "time of a strictly causal tile over a causal one", ("<=", STRICTLY), kernels(problem, "triton")
    step.figure(title, describe(problem), times["strictly"] / times["causal"], wanted, of, **detail)


def several_tiles(step: Step, problem: Problem, libraries: list[str]) -> None:
    """Queries of a larger step than the keys, as on rectangular grids: one launch of ours against one per tile, by our
    kernel, which accumulates, and by libraries, whose results are merged."""
    for count in (2,) if step.smoke else (2, 4, 8):
        rows, keys = (range(count - 1, count * problem.seq_length, count),), (range(count * problem.seq_length),)
        ours = Timed("triton", problem, rows, keys, step.device)
        parts = [Timed("triton", problem, rows, (keys[0][i::count],), step.device) for i in range(count)]

        def one_by_one(parts: list[Timed] = parts) -> None:
            onto = None
            for part in parts:
                onto = part.attend(onto)

        split = {name: Timed(name, problem, rows, keys, step.device) for name in libraries}
        calls: dict[str, dict[str, Call]] = {
            "forward": {"one": ours.forward, "triton": one_by_one}
            | {name: timed.forward for name, timed in split.items()},
            "backward": {"one": ours.backward()} | {name: timed.backward() for name, timed in split.items()},
        }
        for phase, of_phase in calls.items():
            times = medians(of_phase, rounds(step))
            for name in list(times)[1:]:
                wanted = (">=", STAIRCASE) if (name, phase) == ("sdpa", "forward") and count < 8 else None
                detail = {"ms": times["one"], "split ms": times[name]}
                what = f"{count} tiles of {describe(problem)}, {phase}: {name}"
                title, of = "speed of one staircase launch over its tiles", kernels(problem, "triton", name)
                step.figure(title, what, times[name] / times["one"], wanted, of, **detail)


def row_terms(step: Step, problem: Problem, libraries: list[str]) -> None:
    """Time of the row term that libraries need besides lse, over that of a backward pass of one tile."""
    rows = (range(problem.seq_length),)
    for name in libraries:
        one = Timed(name, problem, rows, (range(-problem.seq_length, 0),), step.device)
        out, _ = one.forward()
        delta = (one.x.dout.float() * out.float()).sum(-1)
        calls: dict[str, Call] = {
            "row term": lambda name=name, one=one, delta=delta: backends.get(name).row_term(one.x.dout, delta),
            "backward": one.backward(),
        }
        times = medians(calls, 2 * rounds(step))
        detail = {"ms": times["row term"], "backward ms": times["backward"]}
        title, what = "time of the row term over a backward's", f"{name}, a full tile of {describe(problem)}"
        step.figure(title, what, times["row term"] / times["backward"], of=kernels(problem, name), **detail)


class Pass(NamedTuple):
    """A call limited by memory."""

    call: Call
    moved: int
    """Least number of bytes read and written."""
    wanted: float | None = BANDWIDTH
    """Target over a copy's bandwidth, if any."""


def compare_to_copy(step: Step, group: str, passes: Mapping[str, Pass], source: Tensor, kernel: str = "") -> None:
    """The bandwidth of each call over that of copying ``source`` on the device.

    Args:
        kernel: which all of them use; otherwise the names begin with those of their kernels.
    """
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source)} | {name: one.call for name, one in passes.items()}
    times = medians(calls, 1 if step.smoke else 10)
    copied = 2 * source.nbytes / times["copy"] / 1e6
    for name, one in passes.items():
        bandwidth = one.moved / times[name] / 1e6
        wanted = None if one.wanted is None else (">=", one.wanted)
        of = (f"kernel {kernel or name.split(',')[0]}",)
        detail = {"ms": times[name], "GB/s": bandwidth, "copy GB/s": copied}
        step.figure(group, name, bandwidth / copied, wanted, of, **detail)


def memory_bound(step: Step) -> None:
    """Merging, permuting and packing."""
    if reason := lacking("triton", step.device):
        step.not_run("bandwidth of our kernels", reason)
        return
    from cp_kernels import merge, payload, permute

    tokens, heads, size = (64, 2, 16) if step.smoke else (65536, 16, 128)
    outs, lses = normal(step.device, 4, tokens, 1, heads, size).bfloat16(), normal(step.device, 4, tokens, 1, heads)
    x, total, total_lse = outs[0], normal(step.device, tokens, 1, heads, size), lses[0].clone()
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0)).to(step.device)
    strided = torch.arange(tokens).view(-1, 4).t().reshape(-1).to(step.device)
    packed, like = payload.pack_message((x,), ((tokens,),), BLOCK), (((1, heads, size),), (x.dtype,), ((tokens,),))
    one, rows = x.nbytes, lses[0].nbytes
    both = one + packed.nbytes
    passes = {
        "merge, 4 partials": Pass(lambda: merge.merge(outs.unbind(), lses.unbind(), x.dtype), 5 * (one + rows)),
        "merge, 2 partials": Pass(lambda: merge.merge(outs[:2].unbind(), lses[:2].unbind(), x.dtype), 3 * (one + rows)),
        "merge_into": Pass(lambda: merge.merge_into(total, total_lse, outs[1], lses[1]), 5 * one + 3 * rows),
        "gather_rows, of a gathered grid": Pass(lambda: permute.gather_rows((x,), strided), 2 * one),
        "gather_rows, at random": Pass(lambda: permute.gather_rows((x,), order), 2 * one, None),
        "scatter_rows, of a gathered grid": Pass(lambda: permute.scatter_rows((x,), strided), 2 * one),
        "pack": Pass(lambda: payload.pack_message((x,), ((tokens,),), BLOCK), both, None),
        "unpack": Pass(lambda: payload.unpack_message(packed, *like, BLOCK)[0], both, None),
    }
    compare_to_copy(step, "bandwidth over a copy's", passes, outs)


def decode(step: Step) -> None:
    """One query's attention to a full cache, in both of its storage formats: the cache is read once per token."""
    heads, kv_heads, size = (2, 1, 16) if step.smoke else (32, 8, 128)
    formats = ((False, "in bfloat16"), (True, "in one byte an element"))
    for slots, (fp8, stored) in product((64,) if step.smoke else (131_072, 16_384), formats):
        q = torch.randn((1, 1, heads, size), device=step.device).bfloat16()
        k = torch.randn((slots, 1, kv_heads, size), device=step.device).bfloat16()
        kept = store.Cache(slots, size, k[:1], k[:1], fp8=fp8)
        kept.put(slice(slots), k, k)
        held = torch.arange(slots, dtype=torch.int32, device=step.device)[:, None]
        last = torch.full((1, 1), slots, dtype=torch.int32, device=step.device)
        call = partial(store.attend, q, kept, held, last, Scores(size**-0.5))
        name = f"{slots} tokens, heads {heads}:{kv_heads} of {size} {stored}"
        calls = {"as it is": call, "plain torch": partial(operations.run, call, kernels=False)}
        passes = {f"{name}, {how}": Pass(one, kept.nbytes, None) for how, one in calls.items()}
        compare_to_copy(step, "bandwidth of decode over a copy's", passes, k, "decode")


def methods(step: Step, problem: Problem, ranks: int, backend: str) -> None:
    """Every method, against one call."""
    if reason := lacking(backend, step.device):
        step.not_run(f"efficiency of methods with backend {backend}", reason)
        return
    x = random(problem, problem.seq_length, problem.seq_length, step.device)
    calls: dict[str, Call] = {"one": lambda: attend(ContextParallel("ring", group=None, backend="sdpa"), x, problem)}
    wanted, parts = {}, {}
    for provider, layout, least in METHODS[: 1 if step.smoke else None]:
        name = f"{provider} on {layout}, backend {backend}, {ranks} ranks, {describe(problem)}"
        try:
            options = Options(layout=layout, backend=backend)
            setup = settled(providers.get(provider), replace(problem, size=ranks), options)
            parts[name] = timed_parts(setup, step.device)
            calls[name] = emulated(setup, x)
            calls[name]()
        except Exception as error:  # of any library
            calls.pop(name, None)
            step.not_run(f"efficiency of {name}", one_line(error))
            continue
        wanted[name] = (">=", least) if backend == "auto" and least is not None else None
    times = medians(calls, 1 if step.smoke else 3, warm_up=1)
    for name in wanted:
        detail = {"ms": times[name], "one call ms": times["one"]}
        title, value = "compute efficiency of emulated ranks", times["one"] / times[name]
        step.figure(title, name, value, wanted[name], parts[name], **detail)


def emulated(setup: Setup, x: Inputs) -> Call:
    """Forward and backward of all ranks on shards that are cut beforehand."""

    def cut(mesh: Mesh) -> Inputs:
        return x.sharded(ContextParallel(setup, mesh=mesh), x.q.device)

    shards = run_threads(cut, setup.axes)

    def rank(mesh: Mesh) -> None:
        attend(ContextParallel(setup, mesh=mesh), shards[mesh.index], setup.problem)

    return lambda: run_threads(rank, setup.axes)
