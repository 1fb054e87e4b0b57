"""Our own kernels against their definitions: attention, merging, permuting, packing, decoding, short convolutions.

Attention has the cases of ``tests/kernels/brute.py``, and all else those of ``tests/kernels/operations.py``, on longer
sequences. Compiling takes most of the time, so every process has kernels of its own: those of head sizes and numbers, a
dtype and a direction. They include what later steps time, which then find it compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import brute
import operations
import torch
from cases import kernel, lacking, normal
from record import Row, Step, Verdict, judge, worst
from torch import Tensor
from workers import check_each

from cp_plugin.engine.core.block import Scores
from cp_plugin.engine.core.dtypes import dtype_name
from cp_plugin.engine.inference import store

_CPU = torch.device("cpu")
SUMMED = {torch.float32: 8 * 2**-21, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest relative error of a sum: half a unit in the last place; in float32 the error of a log-sum-exp up to 16, which
becomes a weight's, in up to 8 merges. Twice that in Triton's interpreter, which truncates."""
DECODED = 2e-2
"""Of decoding, whose weights are rounded to the cache's bfloat16."""
FUSED = "fused"
"""Stands for all kernels but attention's."""


class Part(NamedTuple):
    """Attention with these head sizes of keys and values, in one direction, with these sides and masks."""

    sizes: tuple[int, int]
    dtype: torch.dtype
    direction: str
    """``forward`` or ``backward``: different kernels."""
    sides: tuple[str, ...]
    views: tuple[str, ...]
    n: int = 8
    """Multiple of the tokens in the interpreter's tests."""
    heads: tuple[int, int] = (16, 4)
    """Of queries, and of keys. Triton compiles their multiples of 16 apart, and as many of both."""

    def __str__(self) -> str:
        (d, e), (h, g) = self.sizes, self.heads
        return f"{self.direction}, heads {h}:{g} of {d}/{e}, {dtype_name(self.dtype)}"


def our_kernels(step: Step) -> None:
    if reason := lacking("triton", step.device):
        step.not_run("our own kernels", reason)
    else:
        check_each(step, run, parts(smoke=step.smoke), describe_rest)


def describe_rest(part: Part | str) -> tuple[str, str]:
    if isinstance(part, str):
        return part, "merging, permuting, packing, decoding"
    return "attention", f"the rest of {part}"


def parts(*, smoke: bool) -> list[Part | str]:
    """Each runs in a process of its own; the head sizes of today's models in bfloat16 come first."""
    both = "forward", "backward"
    if smoke:
        few = ("staircase, coarse queries",), ("causal",)
        return [FUSED, *(Part((16, 16), torch.float32, direction, *few, 1) for direction in both)]
    few, usual = ("zigzag", "staircase, coarse queries"), ("causal",)
    first = [Part((128, 128), torch.bfloat16, way, tuple(brute.sides()), tuple(brute.views())) for way in both]
    later = (64, 64), (192, 128), (256, 256), (96, 96), (40, 24)
    timed = (128, 128), (64, 64), (192, 128)
    mha = [Part(s, torch.bfloat16, way, few[1:], usual, heads=(16, 16)) for s, way in product(timed, both)]
    nccl = [Part((64, 64), torch.bfloat16, way, few, usual, heads=(8, 4)) for way in both]
    bf16 = [Part(sizes, torch.bfloat16, way, few, usual) for sizes, way in product(later, both)]
    f16 = [Part(sizes, torch.float16, way, few, usual) for sizes, way in product(((128, 128), *later), both)]
    f32 = [Part(sizes, torch.float32, way, few, usual) for sizes, way in product(((128, 128), (64, 64)), both)]
    return [*first, *bf16[:6], *nccl, FUSED, *mha, *bf16[6:], *f16, *f32]


def run(part: Part | str) -> Iterator[Row]:
    return fused() if isinstance(part, str) else attention(part)


def attention(part: Part) -> Iterator[Row]:
    """In one launch, and accumulating over two."""
    device = torch.device("cuda") if torch.cuda.is_available() else _CPU
    sides, views, scale = brute.sides(part.n), brute.views(part.n), part.sizes[0] ** -0.5
    whole, in_two = (forward, forward_in_two) if part.direction == "forward" else (backward, backward_in_two)
    for side, view in product(part.sides, part.views):
        x = brute.Inputs.random(*sides[side], sizes=part.sizes, heads=part.heads, dtype=part.dtype)
        x = brute.Inputs(*(y.to(device) for y in x))
        at = (*sides[side], views[view], scale)
        want = brute.answer(x, *at)
        for how, call in (("", whole), (", in two goes", in_two)):

            def compare(call=call, x=x, at=at, want=want) -> Verdict:
                got = call(x, want, *at)
                errors = brute.errors(want._replace(**got), want)
                return worst({name: errors[name] for name in got}, dict.fromkeys(got, brute.LIMITS[part.dtype]))

            ok, detail = judge(compare)
            yield "attention", f"{side}, {view}{how}: {part}", ok, {"of": (kernel("triton", *part.sizes),)} | detail


Answers = dict[str, Tensor]
"""Some of the fields of ``brute.Answer``."""


def forward(
    x: brute.Inputs, _: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """One launch."""
    from cp_kernels.forward import forward

    out, lse = forward(x.q, x.k, x.v, rows, keys, view, scale)
    return {"out": out, "lse": lse}


def forward_in_two(
    x: brute.Inputs, _: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """The first half of the keys, then the second onto it."""
    from cp_kernels.forward import forward

    (first, k0, v0), (second, k1, v1) = halves(x, keys)
    out, lse = forward(x.q, k0, v0, rows, first, view, scale)
    out, lse = forward(x.q, k1, v1, rows, second, view, scale, (out.float(), lse.contiguous()))
    return {"out": out, "lse": lse}


def backward(
    x: brute.Inputs, want: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """One launch of each kernel, from the exact forward."""
    from cp_kernels.backward import backward

    lse, delta = want.lse.float().contiguous(), (x.dout.double() * want.out).sum(-1).float()
    return dict(zip(("dq", "dk", "dv"), backward(x.dout, *x[:3], lse, delta, rows, keys, view, scale), strict=True))


def backward_in_two(
    x: brute.Inputs, want: brute.Answer, rows: brute.Runs, keys: brute.Runs, view: brute.View, scale: float
) -> Answers:
    """The two halves of the keys, whose gradients of the queries add up."""
    parts = [backward(x._replace(k=k, v=v), want, rows, half, view, scale) for half, k, v in halves(x, keys)]
    both = {name: [part[name] for part in parts] for name in ("dq", "dk", "dv")}
    return {"dq": sum(y.float() for y in both["dq"]), "dk": torch.cat(both["dk"]), "dv": torch.cat(both["dv"])}


def halves(x: brute.Inputs, keys: brute.Runs) -> list[tuple[brute.Runs, Tensor, Tensor]]:
    """The first and the second half of the keys: positions, keys, values."""
    count = left = sum(map(len, keys)) // 2
    first, second = [], []
    for run in keys:
        cut = max(0, min(left, len(run)))
        first, second, left = [*first, run[:cut]], [*second, run[cut:]], left - len(run)
    runs = (tuple(run for run in half if run) for half in (first, second))
    return list(zip(runs, (x.k[:count], x.k[count:]), (x.v[:count], x.v[count:]), strict=True))


def fused() -> Iterator[Row]:
    """All that pass over memory once, in each dtype, and attention to a cache in each of its formats."""
    device, shape = (torch.device("cuda"), (1000, 2, 4, 128)) if torch.cuda.is_available() else (_CPU, (12, 2, 4, 16))
    for dtype, name in product((torch.bfloat16, torch.float16, torch.float32), operations.OPERATIONS):
        x = operations.Operands.random(shape, dtype).each(lambda y: y.to(device))
        ok, detail = judge(partial(compare_operation, name, x))
        yield FUSED, f"{name}, {dtype_name(dtype)}", ok, {"of": (f"kernel {name.split()[0]}",)} | detail
    for fp8, stored in ((False, "in bfloat16"), (True, "in one byte an element")):
        ok, detail = judge(partial(decode, device, shape[0], shape[3], fp8=fp8))
        yield FUSED, f"decode, {stored}", ok, {"of": ("kernel decode",)} | detail


def compare_operation(name: str, x: operations.Operands) -> Verdict:
    """Sums with plain torch in float64, by norms; all else with plain torch bit for bit."""
    call, sums = operations.OPERATIONS[name], name in operations.SUMS
    got = operations.run(lambda: call(x), kernels=True)
    want = operations.run(lambda: call(x.each(torch.Tensor.double) if sums else x), kernels=False)
    pairs = list(zip(got, want, strict=True))
    if not sums:
        differ = sum((a.view(torch.uint8) != b.contiguous().view(torch.uint8)).sum().item() for a, b in pairs)
        return differ == 0, {"bytes that differ": differ}
    errors = {f"result {i}": relative_error(a, b) for i, (a, b) in enumerate(pairs)}
    interpreted = 1 if got[0].is_cuda else 2
    return worst(errors, {f"result {i}": interpreted * SUMMED[a.dtype] for i, a in enumerate(got)})


def decode(device: torch.device, s: int, e: int, *, fp8: bool) -> Verdict:
    """One query's attention to a cache, beside the same in plain torch."""
    q, (k, v) = normal(device, 1, 2, 8, e).bfloat16(), normal(device, 2, s, 2, 2, e).bfloat16()
    cache = store.Cache(s, e, k[:1], v[:1], fp8=fp8)
    cache.put(slice(s), k, v)
    held = torch.arange(s, dtype=torch.int32, device=device)[:, None].expand(s, 2).contiguous()
    arguments = cache, held, torch.full((1, 2), s, dtype=torch.int32, device=device), Scores(e**-0.5)
    got = operations.run(lambda: store.attend(q, *arguments), kernels=True)
    want = operations.run(lambda: store.attend(q.double(), *arguments), kernels=False)
    errors = dict(zip(("out", "lse"), map(relative_error, got, want), strict=True))
    return worst(errors, {"out": DECODED, "lse": 1e-5})


def relative_error(got: Tensor, want: Tensor) -> float:
    """Of the finite numbers, by norms; infinite where finiteness differs."""
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return torch.inf
    return ((got.double() - want)[finite].norm() / want[finite].norm()).item()
